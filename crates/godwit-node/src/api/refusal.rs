//! A refusal as HTTP carries it.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::{ErrorBody, ErrorCode};

/// An answer that is not a success.
#[derive(Debug)]
pub(crate) struct Refusal(pub(crate) ErrorBody);

impl From<ErrorBody> for Refusal {
    fn from(error: ErrorBody) -> Self {
        Self(error)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(error) = self;
        if error.code == ErrorCode::Internal {
            // Whoever looks for more looks there.
            tracing::error!(error = error.message, "a request failed");
        }
        let status =
            StatusCode::from_u16(error.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(error)).into_response()
    }
}
