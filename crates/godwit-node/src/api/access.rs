//! Access rights for the API's routes over TLS. The unix socket gives full access.

use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use super::{ErrorBody, ErrorCode};
use godwit_peers::roles::{Access, Holder, Role};

/// Routes that tell nothing about disks and VMs.
pub(super) const FOR_EVERYBODY: [&str; 2] = ["/health", "/openapi.json"];

/// Returns the right that a request needs. A route not named here needs a reader for reading methods and an operator
/// for all others, so a new route is never open by mistake.
fn needed(method: &Method, path: &str) -> Access {
    match *method {
        Method::GET | Method::HEAD if FOR_EVERYBODY.contains(&path) => Access::Everybody,
        Method::GET | Method::HEAD => Access::Read,
        _ => Access::Operate,
    }
}

/// Lets a request through if the holder of the connection's certificate may make the request.
pub(super) async fn check(State(holder): State<Holder>, request: Request, next: Next) -> Response {
    let access = needed(request.method(), request.uri().path());
    if holder.may(access) {
        next.run(request).await
    } else {
        let (method, path) = (request.method(), request.uri().path());
        tracing::warn!(certificate = %holder, %method, path, "refused a request");
        refusal(&holder, access).into_response()
    }
}

fn refusal(holder: &Holder, access: Access) -> (StatusCode, axum::Json<ErrorBody>) {
    let (wanted, role) = match access {
        Access::Everybody | Access::Read => ("look at this node", Role::Reader),
        Access::Operate => ("control this node", Role::Operator),
    };
    let error = ErrorBody::new(
        ErrorCode::Forbidden,
        format!("the certificate of {holder} does not allow to {wanted}"),
    )
    .hint(format!(
        "use one that was made for it: godwit certs issue NAME --role {role}"
    ));
    (StatusCode::FORBIDDEN, axum::Json(error))
}
