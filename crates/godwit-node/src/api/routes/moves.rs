//! The API's routes about moves of every kind.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{MethodRouter, get, post};
use serde::Deserialize;

use super::{Body, Parameters, Shared, detached};
use crate::api::refusal::Refusal;
use crate::api::{ErrorBody, ErrorCode, MigrateRequest, Migration, Move, SwitchMigration};
use crate::node::Node;
use godwit_disks::migrations::{change, live, outgoing};
use godwit_machines::vms;

pub(in crate::api) fn routes() -> Vec<(&'static str, MethodRouter<Arc<Node>>)> {
    vec![
        ("/v1/migrations", get(list_migrations).post(migrate)),
        ("/v1/migrations/{id}", get(show_migration)),
        ("/v1/migrations/{id}/cancel", post(cancel_migration)),
        ("/v1/migrations/{id}/switch", post(switch_migration)),
    ]
}

/// The table that has a move.
enum Table {
    Disks,
    Vms,
    Processes,
}

impl Table {
    /// Returns the table of an id; an id that no table has is looked up among those of disks.
    fn of(node: &Node, id: &str) -> Self {
        if node.vms.migrations.get(&node.vms, id).is_ok() {
            Self::Vms
        } else if node.processes.moves.table.get(id).is_ok() {
            Self::Processes
        } else {
            Self::Disks
        }
    }
}

/// Lists the moves of disks, VMs, processes and containers: all under way and the last that ended, oldest first. Moves
/// of disks are listed at both nodes, all others at the source. Ended moves of processes and containers are listed until
/// the node ends.
#[utoipa::path(get, path = "/v1/migrations", responses((status = 200, body = Vec<Move>)))]
pub(in crate::api) async fn list_migrations(State(node): Shared) -> Json<Vec<Move>> {
    let disks = node.migrations.all().into_iter();
    let disks = disks.map(|view| match view.id.parse() {
        Ok(id) => live(&node.migrations, id, view),
        Err(_) => view,
    });
    let vms = node.vms.migrations.all(&node.vms).into_iter();
    let processes = node.processes.moves.table.all().into_iter();
    let moves = disks.map(Move::from);
    let moves = moves.chain(vms.map(Move::from));
    let mut moves: Vec<Move> = moves.chain(processes.map(Move::from)).collect();
    moves.sort_by(|a, b| a.started_at().cmp(b.started_at()));
    Json(moves)
}

/// Longest wait that a caller may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// The query of a shown migration.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(in crate::api) struct ShowParameters {
    /// Milliseconds to wait for the end of a disk's migration before the answer, at most 1000.
    #[serde(default)]
    #[param(required = false)]
    wait_ms: u64,
}

/// Shows a move, at once or, on request, when the migration of a disk ends.
#[utoipa::path(get, path = "/v1/migrations/{id}", params(("id" = String, Path), ShowParameters),
    responses((status = 200, body = Move), (status = 404, body = ErrorBody)))]
pub(in crate::api) async fn show_migration(
    State(node): Shared,
    Path(id): Path<String>,
    Parameters(parameters): Parameters<ShowParameters>,
) -> Result<Json<Move>, Refusal> {
    Ok(Json(match Table::of(&node, &id) {
        Table::Vms => node.vms.migrations.get(&node.vms, &id)?.into(),
        Table::Processes => node.processes.moves.table.get(&id)?.into(),
        Table::Disks => {
            let wait = Duration::from_millis(parameters.wait_ms).min(LONGEST_WAIT);
            let (id, view) = node.migrations.get_within(&id, wait).await?;
            live(&node.migrations, id, view).into()
        }
    }))
}

/// Starts to move a disk to another node. Answers once copying has begun, or after a moment if the other node has not
/// answered the offer yet.
#[utoipa::path(post, path = "/v1/migrations", request_body = MigrateRequest, responses(
    (status = 201, body = Migration), (status = 400, body = ErrorBody),
    (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
    (status = 422, body = ErrorBody), (status = 502, body = ErrorBody),
    (status = 507, body = ErrorBody)))]
pub(in crate::api) async fn migrate(
    State(node): Shared,
    Body(request): Body<MigrateRequest>,
) -> Result<(StatusCode, Json<Migration>), Refusal> {
    let started = detached(node, move |node| async move {
        outgoing::start(&node.migrations, request).await
    });
    Ok((StatusCode::CREATED, Json(started.await?)))
}

/// Cancels a move; the source serves or runs on. The move of a process or container can be cancelled until the
/// destination is told to restore the process.
#[utoipa::path(post, path = "/v1/migrations/{id}/cancel", params(("id" = String, Path)), responses(
    (status = 200, body = Move), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn cancel_migration(
    State(node): Shared,
    Path(id): Path<String>,
) -> Result<Json<Move>, Refusal> {
    Ok(Json(match Table::of(&node, &id) {
        Table::Vms => vms::cancel(&node.vms, &id).await?.into(),
        Table::Processes => godwit_processes::outgoing::cancel(&node.processes, &id)
            .await?
            .into(),
        Table::Disks => {
            let (_, view) = node.migrations.get(&id)?;
            if !view.phase.ended() {
                let protections = &node.vms.protections;
                protections.refuse_disk(&view.disk, "left without its backup")?;
            }
            outgoing::cancel(&node.migrations, &id).await?.into()
        }
    }))
}

/// Changes the options of a disk's migration under way, or those of the disks of a moving VM.
#[utoipa::path(post, path = "/v1/migrations/{id}/switch", params(("id" = String, Path)),
    request_body = SwitchMigration, responses(
    (status = 200, body = Move), (status = 400, body = ErrorBody),
    (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn switch_migration(
    State(node): Shared,
    Path(id): Path<String>,
    Body(request): Body<SwitchMigration>,
) -> Result<Json<Move>, Refusal> {
    let changed = detached(node, move |node| async move {
        Ok(match Table::of(&node, &id) {
            Table::Vms => vms::switch(&node.vms, &id, &request).await?.into(),
            Table::Disks => change::change(&node.migrations, &id, &request)
                .await?
                .into(),
            Table::Processes => {
                let text = format!("move {id} is one of a process, and has no options to change");
                let hint = "cancel it, and begin it again with others";
                return Err(ErrorBody::new(ErrorCode::Conflict, text).hint(hint));
            }
        })
    });
    Ok(Json(changed.await?))
}
