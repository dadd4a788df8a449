//! The API's routes about NICs.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::routing::{MethodRouter, get};

use super::refusal::Refusal;
use super::routes::Shared;
use super::{ErrorBody, ErrorCode, Nic};
use crate::nics::view;
use crate::node::Node;

/// The routes with their paths.
pub(super) fn routes() -> Vec<(&'static str, MethodRouter<Arc<Node>>)> {
    vec![
        ("/v1/nics", get(list_nics)),
        ("/v1/nics/{vm}/{number}", get(show_nic)),
    ]
}

/// All NICs that this node serves.
#[utoipa::path(get, path = "/v1/nics", responses((status = 200, body = Vec<Nic>)))]
pub(super) async fn list_nics(State(node): Shared) -> Json<Vec<Nic>> {
    Json(view::all(&node))
}

/// One NIC.
#[utoipa::path(get, path = "/v1/nics/{vm}/{number}",
    params(("vm" = String, Path), ("number" = String, Path)), responses(
    (status = 200, body = Nic), (status = 404, body = ErrorBody)))]
pub(super) async fn show_nic(
    State(node): Shared,
    Path((vm, number)): Path<(String, String)>,
) -> Result<Json<Nic>, Refusal> {
    let shown: String = format!("{vm}/{number}").chars().take(160).collect();
    let found = view::all(&node).into_iter().find(|nic| nic.name == shown);
    let missing = || {
        let text = format!("this node serves no NIC {shown:?}");
        ErrorBody::new(ErrorCode::NotFound, text).hint("see 'godwit nic list'")
    };
    Ok(Json(found.ok_or_else(missing)?))
}
