//! A client of a node's API.

mod connect;

use std::time::Duration;

use godwit_api::ErrorBody;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::SendRequest;
use hyper::{Method, Request, StatusCode, header};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(crate) use self::connect::Endpoint;
use crate::failure::Failure;

/// Longest wait for an answer: a little longer than a node's limit for any request.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(95);
/// Most bytes of an answer.
const ANSWER_LIMIT: usize = 16 << 20;

/// A client of a node's API, which keeps its connection from call to call.
#[derive(Debug)]
pub(crate) struct Client {
    endpoint: Endpoint,
    sender: Option<SendRequest<Full<Bytes>>>,
}

/// The reason why a call has no result.
#[derive(Debug)]
pub(crate) enum CallError {
    /// The node cannot be reached, or the connection broke before the answer.
    Unreachable(Failure),
    /// The node refused the request.
    Refused(ErrorBody),
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Unreachable(failure) => failure,
            CallError::Refused(body) => body.into(),
        }
    }
}

impl Client {
    /// Creates a client that connects on first use.
    pub(crate) fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            sender: None,
        }
    }

    /// Returns true if the node is on this host, so that file paths mean the same to both.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.endpoint, Endpoint::Unix(_))
    }

    /// Sends a GET request.
    pub(crate) async fn get<T: DeserializeOwned>(&mut self, path: &str) -> Result<T, CallError> {
        self.call(Method::GET, path, Bytes::new()).await
    }

    /// Sends a POST request.
    pub(crate) async fn post<T: DeserializeOwned>(
        &mut self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, CallError> {
        let body = to_body(body)?;
        self.call(Method::POST, path, body).await
    }

    /// Sends a POST request without a result.
    pub(crate) async fn order(
        &mut self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<(), CallError> {
        let body = to_body(body)?;
        self.exchange(Method::POST, path, body).await.map(drop)
    }

    /// Sends a DELETE request.
    pub(crate) async fn delete(&mut self, path: &str) -> Result<(), CallError> {
        self.exchange(Method::DELETE, path, Bytes::new())
            .await
            .map(drop)
    }

    async fn call<T: DeserializeOwned>(
        &mut self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<T, CallError> {
        let answer = self.exchange(method, path, body).await?;
        serde_json::from_slice(&answer).map_err(|error| {
            let what = format!("{} answered {path} in a way not understood", self.endpoint);
            let hint = "are the node and this command of the same version?";
            CallError::Unreachable(Failure::caused(what, &error).hint(hint).unreachable())
        })
    }

    async fn exchange(
        &mut self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Bytes, CallError> {
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, self.send(method, path, body)).await;
        match answer {
            Ok(Ok((status, body))) if status.is_success() => Ok(body),
            Ok(Ok((status, body))) => Err(refusal(path, status, &body)),
            Ok(Err(failure)) => {
                self.sender = None;
                Err(CallError::Unreachable(failure))
            }
            Err(_elapsed) => {
                self.sender = None;
                let message = format!(
                    "{} did not answer {path} within {ANSWER_TIMEOUT:?}",
                    self.endpoint
                );
                Err(CallError::Unreachable(
                    Failure::new(message)
                        .hint("look at the node's log, then try again")
                        .unreachable(),
                ))
            }
        }
    }

    async fn send(
        &mut self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(StatusCode, Bytes), Failure> {
        // A connection that the node has closed meanwhile is replaced, before any request is sent.
        let mut kept = self.sender.take();
        if let Some(sender) = &mut kept
            && sender.ready().await.is_err()
        {
            kept = None;
        }
        let mut sender = match kept {
            Some(sender) => sender,
            None => self.endpoint.connect().await?,
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, self.endpoint.host())
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| Failure::caused(format!("cannot ask for {path:?}"), &error))?;
        let response = sender
            .send_request(request)
            .await
            .map_err(|error| self.endpoint.broken(&error))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_LIMIT)
            .collect()
            .await
            .map_err(|error| self.endpoint.broken(error.as_ref()))?;
        self.sender = Some(sender);
        Ok((status, body.to_bytes()))
    }
}

fn to_body(value: &impl Serialize) -> Result<Bytes, CallError> {
    match serde_json::to_vec(value) {
        Ok(body) => Ok(body.into()),
        Err(error) => Err(CallError::Unreachable(Failure::caused(
            "cannot write the request as JSON",
            &error,
        ))),
    }
}

fn refusal(path: &str, status: StatusCode, body: &[u8]) -> CallError {
    match serde_json::from_slice::<ErrorBody>(body) {
        Ok(body) => CallError::Refused(body),
        Err(_) => CallError::Unreachable(
            Failure::new(format!(
                "the node answered {path} with {status} and no explanation"
            ))
            .hint("are the node and this command of the same version?")
            .unreachable(),
        ),
    }
}

/// Encodes a name as one segment of a path.
pub(crate) fn segment(name: &str) -> String {
    name.bytes().fold(String::new(), |mut path, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'~' => path.push(byte.into()),
            // A segment of dots alone would mean a folder.
            b'.' if name.bytes().any(|byte| byte != b'.') => path.push('.'),
            _ => path.push_str(&format!("%{byte:02X}")),
        }
        path
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stays_one_segment() {
        assert_eq!(segment("vm-1.root"), "vm-1.root");
        assert_eq!(segment("a/b?c#d e%"), "a%2Fb%3Fc%23d%20e%25");
        assert_eq!(segment(".."), "%2E%2E");
        assert_eq!(segment("é"), "%C3%A9");
    }

    #[test]
    fn an_answer_that_is_no_api_error_is_explained() {
        let failure = Failure::from(refusal("/v1/x", StatusCode::NOT_FOUND, b"<html>"));
        assert!(failure.message.contains("404"), "{failure}");
        assert!(failure.hint.is_some());
    }
}
