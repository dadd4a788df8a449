//! Loads new certificates without a restart, and warns before the present ones expire.

use std::pin::pin;
use std::time::Duration;

use time::OffsetDateTime;
use tokio::signal::unix::Signal;

use super::NodeTls;

/// Time between two warnings about an expiring or expired certificate.
const TELL_EVERY: Duration = Duration::from_secs(24 * 60 * 60);

/// Reads the files again at each signal, until `closed` is ready. Unusable files change nothing. Open
/// connections stay as they are, unless their certificate is revoked.
pub async fn watch(tls: NodeTls, mut reload: Signal, closed: impl Future<Output = ()>) {
    let mut closed = pin!(closed);
    loop {
        tell(&tls);
        tokio::select! {
            () = tokio::time::sleep(TELL_EVERY) => {}
            signal = reload.recv() => {
                if signal.is_none() {
                    return;
                }
                renew(&tls).await;
            }
            () = &mut closed => return,
        }
    }
}

async fn renew(tls: &NodeTls) {
    let reading = tls.clone();
    match tokio::task::spawn_blocking(move || reading.reload()).await {
        Ok(Ok(ended)) => {
            tracing::info!("read the certificates again: new connections use them");
            if ended > 0 {
                tracing::warn!(
                    ended,
                    "ended the connections of certificates that are revoked"
                );
            }
        }
        Ok(Err(error)) => {
            tracing::error!(%error, "the new certificates are not used: the node keeps the old ones")
        }
        Err(error) => tracing::error!(%error, "the certificates could not be read again"),
    }
}

fn tell(tls: &NodeTls) {
    let now = OffsetDateTime::now_utc().unix_timestamp();
    for (late, text) in tls.current().ends.notices(now) {
        let advice = "issue a new one, put it in place of the old one and reload the node (SIGHUP)";
        if late {
            tracing::error!(advice, "{text}");
        } else {
            tracing::warn!(advice, "{text}");
        }
    }
}
