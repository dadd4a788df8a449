//! The API's routes about NICs.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{MethodRouter, get};
use godwit_api::CreateNic;
use serde::Deserialize;

use super::{Body, Parameters, Shared, detached};
use crate::api::refusal::Refusal;
use crate::api::{ErrorBody, ErrorCode, Nic};
use crate::node::Node;
use godwit_machines::nics::{named, view};

pub(in crate::api) fn routes() -> Vec<(&'static str, MethodRouter<Arc<Node>>)> {
    vec![
        ("/v1/nics", get(list_nics).post(create_nic)),
        ("/v1/nics/{name}", get(show_named_nic).delete(remove_nic)),
        ("/v1/nics/{vm}/{number}", get(show_nic)),
    ]
}

/// Lists all NICs that this node serves.
#[utoipa::path(get, path = "/v1/nics", responses((status = 200, body = Vec<Nic>)))]
pub(in crate::api) async fn list_nics(State(node): Shared) -> Json<Vec<Nic>> {
    Json(view::all(&node.nics))
}

/// Creates a named NIC for a VM that Godwit did not start, and serves the NIC.
#[utoipa::path(post, path = "/v1/nics", request_body = CreateNic, responses(
    (status = 201, body = Nic), (status = 400, body = ErrorBody), (status = 409, body = ErrorBody),
    (status = 500, body = ErrorBody)))]
pub(in crate::api) async fn create_nic(
    State(node): Shared,
    Body(request): Body<CreateNic>,
) -> Result<(StatusCode, Json<Nic>), Refusal> {
    node.context.check_open()?;
    let created = detached(node, move |node| async move {
        let nic = named::create(&node.nics, request).await?;
        Ok(view::named_one(&node.nics, &nic))
    });
    Ok((StatusCode::CREATED, Json(created.await?)))
}

/// Shows a named NIC.
#[utoipa::path(get, path = "/v1/nics/{name}", params(("name" = String, Path)), responses(
    (status = 200, body = Nic), (status = 404, body = ErrorBody)))]
pub(in crate::api) async fn show_named_nic(
    State(node): Shared,
    Path(name): Path<String>,
) -> Result<Json<Nic>, Refusal> {
    let nic = node.nics.get(&name)?;
    Ok(Json(view::named_one(&node.nics, &nic)))
}

/// The query of a NIC's removal.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(in crate::api) struct RemoveNicParameters {
    /// True to remove the NIC even while a VM uses it.
    #[serde(default)]
    #[param(required = false)]
    force: bool,
}

/// Removes a named NIC.
#[utoipa::path(delete, path = "/v1/nics/{name}", params(("name" = String, Path), RemoveNicParameters),
    responses((status = 204, description = "It is gone"),
    (status = 400, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
    (status = 500, body = ErrorBody)))]
pub(in crate::api) async fn remove_nic(
    State(node): Shared,
    Path(name): Path<String>,
    Parameters(parameters): Parameters<RemoveNicParameters>,
) -> Result<StatusCode, Refusal> {
    node.context.check_open()?;
    let removed = detached(node, move |node| async move {
        named::remove(&node.nics, &name, parameters.force).await
    });
    removed.await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Shows a NIC of a VM.
#[utoipa::path(get, path = "/v1/nics/{vm}/{number}",
    params(("vm" = String, Path), ("number" = String, Path)), responses(
    (status = 200, body = Nic), (status = 404, body = ErrorBody)))]
pub(in crate::api) async fn show_nic(
    State(node): Shared,
    Path((vm, number)): Path<(String, String)>,
) -> Result<Json<Nic>, Refusal> {
    let shown: String = format!("{vm}/{number}").chars().take(160).collect();
    let found = view::all(&node.nics)
        .into_iter()
        .find(|nic| nic.name == shown);
    let missing = || {
        let text = format!("this node serves no NIC {shown:?}");
        ErrorBody::new(ErrorCode::NotFound, text).hint("see 'godwit nic list'")
    };
    Ok(Json(found.ok_or_else(missing)?))
}
