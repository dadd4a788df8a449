//! The API's routes about processes.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{MethodRouter, get, post};

use super::{Body, Shared, detached};
use crate::api::ErrorBody;
use crate::api::refusal::Refusal;
use crate::api::{Container, MigrateContainer, MigrateProcess, Process, ProcessMigration};
use crate::node::Node;
use godwit_api::ErrorCode;
use godwit_processes::{outgoing, view};

pub(in crate::api) fn routes() -> Vec<(&'static str, MethodRouter<Arc<Node>>)> {
    vec![
        ("/v1/processes", get(list_processes)),
        ("/v1/processes/{pid}", get(show_process)),
        ("/v1/processes/{pid}/migrate", post(migrate_process)),
        ("/v1/containers", get(list_containers)),
        ("/v1/containers/{id}/migrate", post(migrate_container)),
    ]
}

fn number(pid: &str) -> Result<u32, ErrorBody> {
    pid.parse().map_err(|_| {
        let shown: String = pid.chars().take(64).collect();
        let text = format!("{shown:?} is no number of a process");
        ErrorBody::new(ErrorCode::NotFound, text).hint("see 'godwit process list'")
    })
}

/// Lists the processes of this host that use the RDMA library and have opened a device.
#[utoipa::path(get, path = "/v1/processes", responses((status = 200, body = Vec<Process>),
    (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn list_processes(
    State(node): Shared,
) -> Result<Json<Vec<Process>>, Refusal> {
    Ok(Json(view::all(&node.processes).await?))
}

/// Shows a process, with the obstacles to moving it.
#[utoipa::path(get, path = "/v1/processes/{pid}", params(("pid" = String, Path)), responses(
    (status = 200, body = Process), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn show_process(
    State(node): Shared,
    Path(pid): Path<String>,
) -> Result<Json<Process>, Refusal> {
    Ok(Json(view::one(&node.processes, number(&pid)?).await?))
}

/// Starts to move a process with its RDMA connections to another node. Answers once no obstacle was found; otherwise
/// names every obstacle and changes nothing.
#[utoipa::path(post, path = "/v1/processes/{pid}/migrate", params(("pid" = String, Path)),
    request_body = MigrateProcess, responses(
    (status = 201, body = ProcessMigration), (status = 400, body = ErrorBody),
    (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 422, body = ErrorBody)))]
pub(in crate::api) async fn migrate_process(
    State(node): Shared,
    Path(pid): Path<String>,
    Body(request): Body<MigrateProcess>,
) -> Result<(StatusCode, Json<ProcessMigration>), Refusal> {
    let pid = number(&pid)?;
    let started = detached(node, move |node| async move {
        outgoing::migrate(&node.processes, pid, request).await
    });
    Ok((StatusCode::CREATED, Json(started.await?)))
}

/// Lists the containers of this host under runc, with the obstacles to moving each.
#[utoipa::path(get, path = "/v1/containers", responses((status = 200, body = Vec<Container>),
    (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn list_containers(
    State(node): Shared,
) -> Result<Json<Vec<Container>>, Refusal> {
    Ok(Json(view::containers(&node.processes).await?))
}

/// Starts to move a container, with its process's RDMA connections, to another node. Answers once no obstacle was
/// found; otherwise names every obstacle and changes nothing. The move is listed under /v1/migrations.
#[utoipa::path(post, path = "/v1/containers/{id}/migrate", params(("id" = String, Path)),
    request_body = MigrateContainer, responses(
    (status = 201, body = ProcessMigration), (status = 400, body = ErrorBody),
    (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 422, body = ErrorBody)))]
pub(in crate::api) async fn migrate_container(
    State(node): Shared,
    Path(id): Path<String>,
    Body(request): Body<MigrateContainer>,
) -> Result<(StatusCode, Json<ProcessMigration>), Refusal> {
    let started = detached(node, move |node| async move {
        outgoing::containers::migrate_container(&node.processes, &id, request).await
    });
    Ok((StatusCode::CREATED, Json(started.await?)))
}
