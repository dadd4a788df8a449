//! Serves the API on a unix socket and over mutual TLS.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

use super::access;
use super::refusal::Refusal;
use super::routes;
use super::{ErrorBody, ErrorCode};
use crate::listeners::cannot_take;
use crate::listeners::handshake_slots::HandshakeSlots;
use crate::node::Node;
use godwit_peers::open::SocketNumber;
use godwit_peers::tls::NodeTls;

/// Connections served at once, per listener.
const MAX_CONNECTIONS: usize = 256;
/// Unfinished TLS handshakes, at most.
const MAX_HANDSHAKES: usize = 64;
/// Longest TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for a request's header.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest request. Longer than all steps of a migration's start together.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(90);
/// Time for requests to finish once the node is closing.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves the API on the unix socket until the node is closing.
pub(crate) async fn listen_unix(node: Arc<Node>, listener: UnixListener) {
    let app = app(&node);
    let limit = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = node.context.closed() => break,
        };
        match accepted {
            Ok((socket, _)) => {
                let Ok(permit) = Arc::clone(&limit).try_acquire_owned() else {
                    continue;
                };
                let (node, app) = (Arc::clone(&node), app.clone());
                godwit_context::spawn(async move {
                    serve(&node, app, socket).await;
                    drop(permit);
                });
            }
            Err(error) => cannot_take("an API client", &error).await,
        }
    }
    drain(&limit).await;
}

/// Serves the API over mutual TLS until the node is closing.
pub(crate) async fn listen_tls(node: Arc<Node>, listener: TcpListener, tls: NodeTls) {
    let app = app(&node);
    let limit = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let slots = HandshakeSlots::new(MAX_HANDSHAKES);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = node.context.closed() => break,
        };
        match accepted {
            Ok((socket, address)) => {
                let (node, app, limit) = (Arc::clone(&node), app.clone(), Arc::clone(&limit));
                let tls = tls.clone();
                slots.spawn(async move {
                    let number = SocketNumber::of(&socket);
                    let acceptor = TlsAcceptor::from(Arc::clone(&tls.current().api));
                    let accepting = acceptor.accept(socket);
                    let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_TIMEOUT, accepting).await
                    else {
                        tracing::debug!(%address, "an API client was turned away");
                        return;
                    };
                    let Ok(permit) = limit.try_acquire_owned() else {
                        return;
                    };
                    let chain = stream.get_ref().1.peer_certificates();
                    if tls.opened(number, chain).is_err() {
                        return;
                    }
                    let holder = tls.holder(chain);
                    let app =
                        app.layer(axum::middleware::from_fn_with_state(holder, access::check));
                    godwit_context::spawn(async move {
                        serve(&node, app, stream).await;
                        drop(permit);
                    });
                });
            }
            Err(error) => cannot_take("an API client", &error).await,
        }
    }
    drain(&limit).await;
}

/// Waits until every connection has ended, at most for [`DRAIN_TIMEOUT`].
async fn drain(limit: &Semaphore) {
    let all = u32::try_from(MAX_CONNECTIONS).unwrap_or(u32::MAX);
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, limit.acquire_many(all)).await;
}

fn app(node: &Arc<Node>) -> Router {
    routes::router(Arc::clone(node)).layer(axum::middleware::from_fn(
        async |request: axum::extract::Request, next: axum::middleware::Next| {
            tokio::time::timeout(REQUEST_TIMEOUT, next.run(request))
                .await
                .map_err(|_| {
                    let limit = REQUEST_TIMEOUT.as_secs();
                    let why = format!("the request took longer than {limit} seconds");
                    Refusal(ErrorBody::new(ErrorCode::Busy, why).hint("see the node's log"))
                })
        },
    ))
}

async fn serve(
    node: &Arc<Node>,
    app: Router,
    socket: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(64 << 10)
        .serve_connection(TokioIo::new(socket), TowerToHyperService::new(app));
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = node.context.closed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an API connection ended");
    }
}
