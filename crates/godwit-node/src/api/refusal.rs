//! An API error as an HTTP response.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::{ErrorBody, ErrorCode};

/// An answer other than a success.
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
            // Internal errors point the caller to the log.
            tracing::error!(error = error.message, "a request failed");
        }
        let status =
            StatusCode::from_u16(error.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(error)).into_response()
    }
}
