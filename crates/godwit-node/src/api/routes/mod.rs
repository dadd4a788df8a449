//! The API's routes.

pub(super) mod memory;
pub(super) mod moves;
pub(super) mod nics;
pub(super) mod processes;
pub(super) mod vms;

use std::sync::Arc;

use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Path, Query, State};
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use axum::{Json, Router};
use godwit_core::wire::PROTOCOL_VERSION;
use serde::{Deserialize, Serialize};

use crate::api::refusal::Refusal;
use crate::api::{
    AbandonMissing, ClaimDisk, CreateDisk, Disk, ExportDisk, ImportDisk, Job, Node as NodeView,
    Peer, ResizeDisk,
};
use crate::api::{ErrorBody, ErrorCode};
use crate::metrics;
use crate::node::Node;
use crate::owners;
use godwit_context::blocking;
use godwit_disks::disks::lifecycle::{abandon, claim, remove, resize};
use godwit_disks::disks::storage::promised;
use godwit_disks::disks::{jobs, view};
use godwit_disks::images::creation;
use godwit_peers::clock;

/// The route of imports.
pub(in crate::api) const IMPORT: &str = "/v1/disks/import";

/// Longest request body in bytes.
const MAX_BODY: usize = 64 << 10;

pub(in crate::api) type Shared = State<Arc<Node>>;

/// Returns every route with its path, for the router and for tests.
pub(in crate::api) fn routes() -> Vec<(&'static str, MethodRouter<Arc<Node>>)> {
    let mut routes = vec![
        ("/health", get(health)),
        ("/metrics", get(show_metrics)),
        ("/openapi.json", get(openapi)),
        ("/v1/node", get(show_node)),
        ("/v1/disks", get(list_disks).post(create_disk)),
        (IMPORT, post(import_disk).merge(disk_called_import())),
        ("/v1/disks/{name}", get(show_disk).delete(remove_disk)),
        ("/v1/disks/{name}/export", post(export_disk)),
        ("/v1/disks/{name}/claim", post(claim_disk)),
        ("/v1/disks/{name}/resize", post(resize_disk)),
        ("/v1/disks/{name}/abandon", post(abandon_missing)),
        ("/v1/jobs", get(list_jobs)),
        ("/v1/jobs/{id}", get(show_job)),
        ("/v1/peers", get(list_peers)),
    ];
    routes.extend(moves::routes());
    routes.extend(vms::routes());
    routes.extend(nics::routes());
    routes.extend(memory::routes());
    routes.extend(processes::routes());
    routes
}

/// Routes `/v1/disks/import` as a disk's path for a disk named `import`.
fn disk_called_import() -> MethodRouter<Arc<Node>> {
    let name = || Path("import".to_owned());
    get(move |node: Shared| show_disk(node, name())).delete(
        move |node: Shared, parameters: Parameters<RemoveParameters>| {
            remove_disk(node, name(), parameters)
        },
    )
}

pub(in crate::api) fn router(node: Arc<Node>) -> Router {
    routes()
        .into_iter()
        .fold(Router::new(), |router, (path, methods)| {
            router.route(path, methods.fallback(wrong_method))
        })
        .fallback(no_route)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(node)
}

/// A JSON body. An invalid body is refused with a JSON error.
pub(in crate::api) struct Body<T>(pub(in crate::api) T);

impl<T, S> FromRequest<S> for Body<T>
where
    Json<T>: FromRequest<S, Rejection = JsonRejection>,
    S: Send + Sync,
{
    type Rejection = Refusal;

    async fn from_request(
        request: axum::extract::Request,
        state: &S,
    ) -> Result<Self, Self::Rejection> {
        match Json::<T>::from_request(request, state).await {
            Ok(Json(body)) => Ok(Self(body)),
            Err(rejection) => {
                let why = format!("the request's body is not valid: {}", rejection.body_text());
                let error = ErrorBody::new(ErrorCode::Invalid, why);
                Err(Refusal(
                    error.hint("see /openapi.json for what each route takes"),
                ))
            }
        }
    }
}

/// A query string. An invalid query is refused with a JSON error.
pub(in crate::api) struct Parameters<T>(pub(in crate::api) T);

impl<T, S> FromRequestParts<S> for Parameters<T>
where
    Query<T>: FromRequestParts<S, Rejection = QueryRejection>,
    S: Send + Sync,
{
    type Rejection = Refusal;

    async fn from_request_parts(
        parts: &mut axum::http::request::Parts,
        state: &S,
    ) -> Result<Self, Self::Rejection> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(parameters)) => Ok(Self(parameters)),
            Err(rejection) => {
                let why = format!("the query is not valid: {}", rejection.body_text());
                Err(Refusal(ErrorBody::new(ErrorCode::Invalid, why)))
            }
        }
    }
}

async fn no_route() -> Refusal {
    let error = ErrorBody::new(ErrorCode::NotFound, "there is no such route");
    Refusal(error.hint("see /openapi.json"))
}

async fn wrong_method() -> Response {
    let error = ErrorBody::new(ErrorCode::Invalid, "the route does not take this method")
        .hint("see /openapi.json");
    (StatusCode::METHOD_NOT_ALLOWED, Json(error)).into_response()
}

/// Answers 200 while the node takes work.
#[utoipa::path(get, path = "/health", responses(
    (status = 200, description = "It does"),
    (status = 503, description = "It is shutting down", body = ErrorBody)))]
pub(in crate::api) async fn health(State(node): Shared) -> Result<Json<Health>, Refusal> {
    node.context.check_open()?;
    Ok(Json(Health { status: "ok" }))
}

/// The answer of a healthy node.
#[derive(Serialize)]
pub(in crate::api) struct Health {
    status: &'static str,
}

/// Returns the metrics in Prometheus' text format, or in OpenMetrics for a client that accepts OpenMetrics.
#[utoipa::path(get, path = "/metrics", responses(
    (status = 200, description = "The metrics", content(
        (String = "text/plain"), (String = "application/openmetrics-text")))))]
pub(in crate::api) async fn show_metrics(
    State(node): Shared,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let accepted = headers.get(ACCEPT).and_then(|value| value.to_str().ok());
    let format = metrics::Format::of(accepted.unwrap_or_default());
    let text = blocking(move || metrics::encode(&node, format))
        .await?
        .map_err(|error| {
            ErrorBody::new(
                ErrorCode::Internal,
                format!("the metrics cannot be written: {error}"),
            )
        })?;
    let kind = HeaderValue::from_static(format.media_type());
    Ok(([(CONTENT_TYPE, kind)], text).into_response())
}

/// Returns this document.
#[utoipa::path(get, path = "/openapi.json", responses(
    (status = 200, description = "The OpenAPI document")))]
pub(in crate::api) async fn openapi() -> Json<utoipa::openapi::OpenApi> {
    Json(crate::api::document())
}

/// Shows the node.
#[utoipa::path(get, path = "/v1/node", responses((status = 200, body = NodeView)))]
pub(in crate::api) async fn show_node(State(node): Shared) -> Json<NodeView> {
    Json(NodeView {
        name: node.context.config.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol_version: PROTOCOL_VERSION,
        peer_listen: node.context.config.listen.to_string(),
        data_dir: node.context.config.data_dir.display().to_string(),
        started_at: node.started_at.clone(),
        cpu_seconds: clock::process_cpu_seconds(),
    })
}

/// Lists all disks that this node knows.
#[utoipa::path(get, path = "/v1/disks", responses((status = 200, body = Vec<Disk>)))]
pub(in crate::api) async fn list_disks(State(node): Shared) -> Result<Json<Vec<Disk>>, Refusal> {
    let disks = blocking(move || {
        node.disks
            .all()
            .iter()
            .map(|disk| view::disk(&node.disks, disk))
            .collect()
    });
    Ok(Json(disks.await?))
}

/// Shows a disk.
#[utoipa::path(get, path = "/v1/disks/{name}", params(("name" = String, Path)), responses(
    (status = 200, body = Disk), (status = 404, body = ErrorBody)))]
pub(in crate::api) async fn show_disk(
    State(node): Shared,
    Path(name): Path<String>,
) -> Result<Json<Disk>, Refusal> {
    let disk = node.disks.get(&name)?;
    Ok(Json(shown(node, disk).await?))
}

async fn shown(
    node: Arc<Node>,
    disk: Arc<godwit_disks::disks::disk::Disk>,
) -> Result<Disk, ErrorBody> {
    blocking(move || view::disk(&node.disks, &disk)).await
}

/// Creates a disk.
#[utoipa::path(post, path = "/v1/disks", request_body = CreateDisk, responses(
    (status = 201, body = Disk), (status = 400, body = ErrorBody),
    (status = 404, description = "There is no such image", body = ErrorBody),
    (status = 409, body = ErrorBody),
    (status = 507, body = ErrorBody)))]
pub(in crate::api) async fn create_disk(
    State(node): Shared,
    Body(request): Body<CreateDisk>,
) -> Result<(StatusCode, Json<Disk>), Refusal> {
    node.context.check_open()?;
    let made = detached(Arc::clone(&node), move |node| async move {
        creation::create_disk(&node.images, request).await
    });
    let disk = made.await?;
    let warning = promised::warning(&node.disks, &disk).await;
    let mut shown = shown(node, disk).await?;
    shown.warnings.extend(warning);
    Ok((StatusCode::CREATED, Json(shown)))
}

/// Starts to copy a raw image into a new disk; the job shows the progress.
#[utoipa::path(post, path = "/v1/disks/import", request_body = ImportDisk, responses(
    (status = 202, body = Job), (status = 400, body = ErrorBody),
    (status = 404, description = "There is no such image", body = ErrorBody),
    (status = 409, body = ErrorBody),
    (status = 507, body = ErrorBody)))]
pub(in crate::api) async fn import_disk(
    State(node): Shared,
    Body(request): Body<ImportDisk>,
) -> Result<(StatusCode, Json<Job>), Refusal> {
    node.context.check_open()?;
    let job = detached(node, move |node| async move {
        jobs::start_import(&node.disks, request.name, request.path, request.format).await
    });
    Ok((StatusCode::ACCEPTED, Json(job.await?)))
}

/// Starts to copy an unused disk into a raw image; the job shows the progress.
#[utoipa::path(post, path = "/v1/disks/{name}/export", params(("name" = String, Path)),
    request_body = ExportDisk, responses(
    (status = 202, body = Job), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn export_disk(
    State(node): Shared,
    Path(name): Path<String>,
    Body(request): Body<ExportDisk>,
) -> Result<(StatusCode, Json<Job>), Refusal> {
    node.context.check_open()?;
    Ok((
        StatusCode::ACCEPTED,
        Json(jobs::start_export(&node.disks, &name, request.path).await?),
    ))
}

/// The query of a disk's removal.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(in crate::api) struct RemoveParameters {
    /// True to remove the disk even with clients attached or with its owner in doubt.
    #[serde(default)]
    #[param(required = false)]
    force: bool,
}

/// Removes a disk, with its image if the node made the image.
#[utoipa::path(delete, path = "/v1/disks/{name}", params(("name" = String, Path), RemoveParameters),
    responses((status = 204, description = "It is gone"), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn remove_disk(
    State(node): Shared,
    Path(name): Path<String>,
    Parameters(parameters): Parameters<RemoveParameters>,
) -> Result<StatusCode, Refusal> {
    node.context.check_open()?;
    let removed = detached(node, move |node| async move {
        node.vms.protections.refuse_disk(&name, "removed")?;
        remove::remove(&node.disks, &name, parameters.force).await
    });
    removed.await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Makes this node the owner of a disk in doubt. Writes are lost if the other node serves the disk too.
#[utoipa::path(post, path = "/v1/disks/{name}/claim", params(("name" = String, Path)),
    request_body = ClaimDisk, responses(
    (status = 200, body = Disk), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn claim_disk(
    State(node): Shared,
    Path(name): Path<String>,
    Body(request): Body<ClaimDisk>,
) -> Result<Json<Disk>, Refusal> {
    node.context.check_open()?;
    let claimed = detached(Arc::clone(&node), move |node| async move {
        claim::claim(&node.disks, &name, request.force).await
    });
    let disk = claimed.await?;
    Ok(Json(shown(node, disk).await?))
}

/// Makes a disk larger. A VM on the disk sees the new size after its next start.
#[utoipa::path(post, path = "/v1/disks/{name}/resize", params(("name" = String, Path)),
    request_body = ResizeDisk, responses(
    (status = 200, body = Disk), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn resize_disk(
    State(node): Shared,
    Path(name): Path<String>,
    Body(request): Body<ResizeDisk>,
) -> Result<Json<Disk>, Refusal> {
    node.context.check_open()?;
    let resized = detached(Arc::clone(&node), move |node| async move {
        node.vms.protections.refuse_disk(&name, "made larger")?;
        resize::resize(&node.disks, &name, request).await
    });
    let disk = resized.await?;
    Ok(Json(shown(node, disk).await?))
}

/// Gives up the missing part of a disk, because the node that holds the part is lost for good. Reads of the part fail
/// from then on.
#[utoipa::path(post, path = "/v1/disks/{name}/abandon", params(("name" = String, Path)),
    request_body = AbandonMissing, responses(
    (status = 200, body = Disk), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(in crate::api) async fn abandon_missing(
    State(node): Shared,
    Path(name): Path<String>,
    Body(request): Body<AbandonMissing>,
) -> Result<Json<Disk>, Refusal> {
    node.context.check_open()?;
    let abandoned = detached(Arc::clone(&node), move |node| async move {
        abandon::abandon(&node.disks, &name, request.lost).await
    });
    let disk = abandoned.await?;
    Ok(Json(shown(node, disk).await?))
}

/// Lists the imports and exports since the node's start.
#[utoipa::path(get, path = "/v1/jobs", responses((status = 200, body = Vec<Job>)))]
pub(in crate::api) async fn list_jobs(State(node): Shared) -> Json<Vec<Job>> {
    Json(node.disks.jobs.all())
}

/// Shows an import or export.
#[utoipa::path(get, path = "/v1/jobs/{id}", params(("id" = String, Path)), responses(
    (status = 200, body = Job), (status = 404, body = ErrorBody)))]
pub(in crate::api) async fn show_job(
    State(node): Shared,
    Path(id): Path<String>,
) -> Result<Json<Job>, Refusal> {
    Ok(Json(node.disks.jobs.get(&id)?))
}

/// Lists the other nodes, with their reachability now.
#[utoipa::path(get, path = "/v1/peers", responses((status = 200, body = Vec<Peer>)))]
pub(in crate::api) async fn list_peers(State(node): Shared) -> Json<Vec<Peer>> {
    Json(owners::meet_all(&node).await)
}

/// Runs work to its end even if the client hangs up: half-done work must not remain.
pub(in crate::api) async fn detached<
    T: Send + 'static,
    F: Future<Output = Result<T, ErrorBody>> + Send + 'static,
>(
    node: Arc<Node>,
    work: impl FnOnce(Arc<Node>) -> F,
) -> Result<T, ErrorBody> {
    godwit_context::spawn(work(node))
        .await
        .unwrap_or_else(|error| {
            Err(ErrorBody::new(
                ErrorCode::Internal,
                format!("the request's task failed: {error}"),
            ))
        })
}
