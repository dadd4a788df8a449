//! Processes as the API shows them.

use godwit_verbs::control::{self, Status};

use super::host::runc;
use super::{check_enabled, outgoing, status, statuses};
use crate::Processes;
use godwit_api::{Container, ErrorBody, ErrorCode, Process};
use godwit_context::blocking;

/// Returns all processes of this host that use the library and have opened a device.
///
/// # Errors
/// The node does not move processes, or the kernel's list cannot be read.
pub async fn all(processes: &Processes) -> Result<Vec<Process>, ErrorBody> {
    check_enabled(processes)?;
    let listed = blocking(control::processes).await?;
    let pids = listed.map_err(|error| {
        ErrorBody::new(ErrorCode::Internal, format!("cannot list sockets: {error}"))
    })?;
    let found = statuses(pids).await;
    Ok(found
        .iter()
        .map(|(pid, status)| shown(*pid, status))
        .collect())
}

/// Returns a process of this host that uses the library.
///
/// # Errors
/// [`ErrorCode::NotFound`] with the reason, if the process has no status.
pub async fn one(processes: &Processes, pid: u32) -> Result<Process, ErrorBody> {
    check_enabled(processes)?;
    match status(pid).await {
        Ok(status) => Ok(shown(pid, &status)),
        Err(error) => {
            Err(ErrorBody::new(ErrorCode::NotFound, error).hint("see 'godwit process list'"))
        }
    }
}

/// Returns all containers of this host under runc.
///
/// # Errors
/// The node does not move processes, or runc gives no list.
pub async fn containers(processes: &Processes) -> Result<Vec<Container>, ErrorBody> {
    check_enabled(processes)?;
    let listed = runc::list().await;
    let listed = listed.map_err(|error| {
        ErrorBody::new(ErrorCode::Conflict, error)
            .hint("containers are those of runc, as root has them")
    })?;
    let mut found = Vec::new();
    for one in listed {
        let runs = one.pid > 0;
        let (rdma_processes, obstacles) = if runs {
            let users = outgoing::containers::users(one.pid).await;
            // The container may have ended just now.
            let users = users.unwrap_or_default();
            let mut obstacles = runc::reasons(&one).await;
            obstacles.extend(runc::without_library(&one.id, one.pid, &users));
            (users, obstacles)
        } else {
            (Vec::new(), Vec::new())
        };
        found.push(Container {
            id: one.id,
            status: one.status,
            pid: runs.then_some(one.pid),
            bundle: one.bundle,
            rdma_processes,
            obstacles,
        });
    }
    Ok(found)
}

pub(crate) fn command(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim().to_owned()
}

fn shown(pid: u32, status: &Status) -> Process {
    let connected = status
        .queue_pairs
        .iter()
        .filter(|pair| pair.remote.is_some());
    Process {
        pid,
        command: command(pid),
        queue_pairs: status.queue_pairs.len(),
        connected: connected.count(),
        devices: status
            .needs
            .iter()
            .map(|need| need.device.clone())
            .collect(),
        obstacles: status
            .obstacles
            .iter()
            .map(|one| one.what.clone())
            .collect(),
    }
}
