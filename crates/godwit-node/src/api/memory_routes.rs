//! The API's routes about memory pools.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::routing::{MethodRouter, get};

use super::ErrorBody;
use super::refusal::Refusal;
use super::routes::Shared;
use crate::node::{Node, blocking};
use crate::vms::memory::pooled;
use godwit_api::MemoryPool;

/// The routes with their paths.
pub(super) fn routes() -> Vec<(&'static str, MethodRouter<Arc<Node>>)> {
    vec![
        ("/v1/memory-pools", get(list_memory_pools)),
        ("/v1/memory-pools/{name}", get(show_memory_pool)),
    ]
}

/// The memory pools of this node.
#[utoipa::path(get, path = "/v1/memory-pools", responses((status = 200, body = Vec<MemoryPool>),
    (status = 500, body = ErrorBody)))]
pub(super) async fn list_memory_pools(
    State(node): Shared,
) -> Result<Json<Vec<MemoryPool>>, Refusal> {
    let looked = blocking(move || pooled::show_all(&node.config));
    Ok(Json(looked.await?))
}

/// One memory pool.
#[utoipa::path(get, path = "/v1/memory-pools/{name}", params(("name" = String, Path)), responses(
    (status = 200, body = MemoryPool), (status = 404, body = ErrorBody),
    (status = 500, body = ErrorBody)))]
pub(super) async fn show_memory_pool(
    State(node): Shared,
    Path(name): Path<String>,
) -> Result<Json<MemoryPool>, Refusal> {
    let looked = blocking(move || pooled::show(&node.config, &name));
    Ok(Json(looked.await??))
}
