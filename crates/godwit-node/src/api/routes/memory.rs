//! The API's routes about memory pools.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{MethodRouter, get, post};

use super::{Body, Shared};
use crate::api::ErrorBody;
use crate::api::refusal::Refusal;
use crate::node::Node;
use godwit_api::{FormatMemoryPool, MemoryPool};
use godwit_context::blocking;
use godwit_machines::vms::memory::pools;

pub(in crate::api) fn routes() -> Vec<(&'static str, MethodRouter<Arc<Node>>)> {
    vec![
        ("/v1/memory-pools", get(list_memory_pools)),
        ("/v1/memory-pools/{name}", get(show_memory_pool)),
        ("/v1/memory-pools/{name}/format", post(format_memory_pool)),
    ]
}

/// Lists the memory pools of this node.
#[utoipa::path(get, path = "/v1/memory-pools", responses((status = 200, body = Vec<MemoryPool>),
    (status = 500, body = ErrorBody)))]
pub(in crate::api) async fn list_memory_pools(
    State(node): Shared,
) -> Result<Json<Vec<MemoryPool>>, Refusal> {
    let looked = blocking(move || pools::show_all(&node.context.config));
    Ok(Json(looked.await?))
}

/// Shows a memory pool.
#[utoipa::path(get, path = "/v1/memory-pools/{name}", params(("name" = String, Path)), responses(
    (status = 200, body = MemoryPool), (status = 404, body = ErrorBody),
    (status = 500, body = ErrorBody)))]
pub(in crate::api) async fn show_memory_pool(
    State(node): Shared,
    Path(name): Path<String>,
) -> Result<Json<MemoryPool>, Refusal> {
    let looked = blocking(move || pools::show(&node.context.config, &name));
    Ok(Json(looked.await??))
}

/// Formats the device or file of a memory pool: writes an empty table at its start.
#[utoipa::path(post, path = "/v1/memory-pools/{name}/format", params(("name" = String, Path)),
    request_body = FormatMemoryPool, responses((status = 204, description = "It is a pool"),
    (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody), (status = 500, body = ErrorBody),
    (status = 507, body = ErrorBody)))]
pub(in crate::api) async fn format_memory_pool(
    State(node): Shared,
    Path(name): Path<String>,
    Body(request): Body<FormatMemoryPool>,
) -> Result<StatusCode, Refusal> {
    node.context.check_open()?;
    let made = blocking(move || pools::format(&node.context.config, &name, request.overwrite));
    made.await??;
    Ok(StatusCode::NO_CONTENT)
}
