//! The API's routes about VMs.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{MethodRouter, get, post};
use serde::Deserialize;

use super::{Body, Parameters, Shared, detached};
use crate::api::ErrorBody;
use crate::api::refusal::Refusal;
use crate::api::{AdoptVm, MigrateVm, RunVm, StopVm, Vm, VmMigration};
use crate::node::Node;
use godwit_api::{MoveMemory, ProtectVm};
use godwit_machines::protect;
use godwit_machines::vms::memory::mover;
use godwit_machines::vms::{self, view};

/// The route of adoptions.
pub(in crate::api) const ADOPT: &str = "/v1/vms/adopt";

/// Routes `/v1/vms/adopt` as a VM's path for a VM named `adopt`.
fn vm_called_adopt() -> MethodRouter<Arc<Node>> {
    let name = || Path("adopt".to_owned());
    get(move |node: Shared| show_vm(node, name())).delete(
        move |node: Shared, parameters: Parameters<ForgetParameters>| {
            forget_vm(node, name(), parameters)
        },
    )
}

pub(in crate::api) fn routes() -> Vec<(&'static str, MethodRouter<Arc<Node>>)> {
    vec![
        ("/v1/vms", get(list_vms).post(run_vm)),
        (ADOPT, post(adopt_vm).merge(vm_called_adopt())),
        ("/v1/vms/{name}", get(show_vm).delete(forget_vm)),
        ("/v1/vms/{name}/stop", post(stop_vm)),
        ("/v1/vms/{name}/resume", post(resume_vm)),
        ("/v1/vms/{name}/memory", post(move_memory)),
        ("/v1/vms/{name}/memory/cancel", post(cancel_memory)),
        ("/v1/vms/{name}/migrate", post(migrate_vm)),
        (
            "/v1/vms/{name}/protection",
            post(protect_vm).delete(unprotect_vm),
        ),
        ("/v1/vms/{name}/failover", post(fail_over_vm)),
    ]
}

/// Lists all VMs that this node knows.
#[utoipa::path(get, path = "/v1/vms", responses((status = 200, body = Vec<Vm>)))]
pub(in crate::api) async fn list_vms(State(node): Shared) -> Json<Vec<Vm>> {
    let backups = node.vms.protections.backups(&node.vms);
    let all = node.vms.all();
    let is_backup = |vm: &Arc<vms::vm::Vm>| backups.iter().any(|backup| backup.name == vm.name);
    let own = all
        .iter()
        .filter(|vm| !is_backup(vm))
        .map(|vm| view::vm(vm));
    let mut shown: Vec<Vm> = own.collect();
    shown.extend(backups);
    shown.sort_by(|one, other| one.name.cmp(&other.name));
    Json(shown)
}

/// Shows a VM.
#[utoipa::path(get, path = "/v1/vms/{name}", params(("name" = String, Path)), responses(
    (status = 200, body = Vm), (status = 404, body = ErrorBody)))]
pub(in crate::api) async fn show_vm(
    State(node): Shared,
    Path(name): Path<String>,
) -> Result<Json<Vm>, Refusal> {
    if let Some(backup) = node.vms.protections.backup(&node.vms, &name) {
        return Ok(Json(backup));
    }
    Ok(Json(view::vm(node.vms.get(&name)?.as_ref())))
}

/// Starts a VM on disks of this node.
#[utoipa::path(post, path = "/v1/vms", request_body = RunVm, responses(
    (status = 201, body = Vm), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody), (status = 500, body = ErrorBody)))]
pub(in crate::api) async fn run_vm(
    State(node): Shared,
    Body(request): Body<RunVm>,
) -> Result<(StatusCode, Json<Vm>), Refusal> {
    node.context.check_open()?;
    let started = detached(node, move |node| async move {
        vms::run(&node.vms, request).await
    });
    Ok((StatusCode::CREATED, Json(view::vm(started.await?.as_ref()))))
}

/// Takes over a running VM that Godwit did not start.
#[utoipa::path(post, path = "/v1/vms/adopt", request_body = AdoptVm, responses(
    (status = 201, body = Vm), (status = 400, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn adopt_vm(
    State(node): Shared,
    Body(request): Body<AdoptVm>,
) -> Result<(StatusCode, Json<Vm>), Refusal> {
    node.context.check_open()?;
    let adopted = detached(node, move |node| async move {
        vms::adopt(&node.vms, request).await
    });
    Ok((StatusCode::CREATED, Json(view::vm(adopted.await?.as_ref()))))
}

/// Stops a VM and forgets the VM; its disks stay.
#[utoipa::path(post, path = "/v1/vms/{name}/stop", params(("name" = String, Path)),
    request_body = StopVm, responses((status = 204, description = "It is gone"),
    (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn stop_vm(
    State(node): Shared,
    Path(name): Path<String>,
    Body(request): Body<StopVm>,
) -> Result<StatusCode, Refusal> {
    node.context.check_open()?;
    let stopped = detached(node, move |node| async move {
        vms::stop(&node.vms, &name, request).await
    });
    stopped.await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The query of a VM's resumption.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(in crate::api) struct ResumeParameters {
    /// True to resume an arrived VM even if its source does not confirm the handover. If the VM runs at the source, two
    /// copies run.
    #[serde(default)]
    #[param(required = false)]
    force: bool,
}

/// Resumes a paused VM, such as a VM whose host had no room for its writes.
#[utoipa::path(post, path = "/v1/vms/{name}/resume", params(("name" = String, Path), ResumeParameters),
    responses((status = 204, description = "It runs"), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn resume_vm(
    State(node): Shared,
    Path(name): Path<String>,
    Parameters(parameters): Parameters<ResumeParameters>,
) -> Result<StatusCode, Refusal> {
    node.context.check_open()?;
    let resumed = detached(node, move |node| async move {
        vms::resume(&node.vms, &name, parameters.force).await
    });
    resumed.await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Starts to move a VM's memory between its memory pool and this node, while the guest runs. The VM shows the progress.
#[utoipa::path(post, path = "/v1/vms/{name}/memory", params(("name" = String, Path)),
    request_body = MoveMemory, responses((status = 204, description = "It moves"),
    (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody), (status = 500, body = ErrorBody)))]
pub(in crate::api) async fn move_memory(
    State(node): Shared,
    Path(name): Path<String>,
    Body(request): Body<MoveMemory>,
) -> Result<StatusCode, Refusal> {
    node.context.check_open()?;
    let begun = detached(node, move |node| async move {
        mover::start(&node.vms, &name, request).await
    });
    begun.await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Stops a move of a VM's memory halfway: the guest goes on with a part of its memory on each side.
#[utoipa::path(post, path = "/v1/vms/{name}/memory/cancel", params(("name" = String, Path)),
    responses((status = 204, description = "It ends"), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn cancel_memory(
    State(node): Shared,
    Path(name): Path<String>,
) -> Result<StatusCode, Refusal> {
    mover::cancel(&node.vms, &name)?;
    Ok(StatusCode::NO_CONTENT)
}

/// The query of a VM's removal from the list.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(in crate::api) struct ForgetParameters {
    /// True to forget the VM even while this node holds the rest of its memory.
    #[serde(default)]
    #[param(required = false)]
    force: bool,
}

/// Removes a VM that moved to another node from this node's list.
#[utoipa::path(delete, path = "/v1/vms/{name}", params(("name" = String, Path), ForgetParameters),
    responses((status = 204, description = "It is off the list"),
    (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn forget_vm(
    State(node): Shared,
    Path(name): Path<String>,
    Parameters(parameters): Parameters<ForgetParameters>,
) -> Result<StatusCode, Refusal> {
    node.context.check_open()?;
    let forgotten = detached(node, move |node| async move {
        vms::forget(&node.vms, &name, parameters.force).await
    });
    forgotten.await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Starts to move a VM with its disks to another node. Answers once no obstacle was found; otherwise names every
/// obstacle and moves nothing.
#[utoipa::path(post, path = "/v1/vms/{name}/migrate", params(("name" = String, Path)),
    request_body = MigrateVm, responses(
    (status = 201, body = VmMigration), (status = 400, body = ErrorBody),
    (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
    (status = 422, body = ErrorBody), (status = 502, body = ErrorBody)))]
pub(in crate::api) async fn migrate_vm(
    State(node): Shared,
    Path(name): Path<String>,
    Body(request): Body<MigrateVm>,
) -> Result<(StatusCode, Json<VmMigration>), Refusal> {
    let started = detached(node, move |node| async move {
        vms::migrate(&node.vms, &name, request).await
    });
    Ok((StatusCode::CREATED, Json(started.await?)))
}

/// Protects a VM: its disks' writes reach a second node before they are acknowledged, and that node starts the VM anew
/// if this one is lost. Answers once the second node has begun to take the disks; the VM shows the progress.
#[utoipa::path(post, path = "/v1/vms/{name}/protection", params(("name" = String, Path)),
    request_body = ProtectVm, responses(
    (status = 201, body = Vm), (status = 400, body = ErrorBody),
    (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
    (status = 422, body = ErrorBody), (status = 502, body = ErrorBody)))]
pub(in crate::api) async fn protect_vm(
    State(node): Shared,
    Path(name): Path<String>,
    Body(request): Body<ProtectVm>,
) -> Result<(StatusCode, Json<Vm>), Refusal> {
    let protected = detached(node, move |node| async move {
        protect::protect(&node.vms, &name, request).await
    });
    Ok((
        StatusCode::CREATED,
        Json(view::vm(protected.await?.as_ref())),
    ))
}

/// The query of a protection's end.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(in crate::api) struct UnprotectParameters {
    /// True to ask neither the witness nor the other node. If the VM runs there, two copies run.
    #[serde(default)]
    #[param(required = false)]
    force: bool,
}

/// Ends the protection of a VM, which goes on without a backup.
#[utoipa::path(delete, path = "/v1/vms/{name}/protection",
    params(("name" = String, Path), UnprotectParameters),
    responses((status = 204, description = "It is not protected"), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn unprotect_vm(
    State(node): Shared,
    Path(name): Path<String>,
    Parameters(parameters): Parameters<UnprotectParameters>,
) -> Result<StatusCode, Refusal> {
    let unprotected = detached(node, move |node| async move {
        protect::unprotect(&node.vms, &name, parameters.force).await
    });
    unprotected.await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lets the backup of a VM take the VM, whose node is down.
#[utoipa::path(post, path = "/v1/vms/{name}/failover", params(("name" = String, Path)),
    responses((status = 204, description = "It is here"), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn fail_over_vm(
    State(node): Shared,
    Path(name): Path<String>,
) -> Result<StatusCode, Refusal> {
    let taken = detached(node, move |node| async move {
        protect::failover(&node.vms, &name).await
    });
    taken.await?;
    Ok(StatusCode::NO_CONTENT)
}
