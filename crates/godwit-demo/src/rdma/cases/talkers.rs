//! Two processes that check everything. One of them moves by itself or in a container, and may be killed meanwhile.

use std::io;

use godwit_testkit::rdma::{
    ALIAS, Bed, Place, checked_end, connected, detach_container_move, detach_move,
};

use crate::rdma::cases::checking::{self, ENDS, Variant};
use crate::rdma::cases::container::{self, BUNDLES};

const CONTAINER: &str = "checker";

/// The mover from guest 1 to guest 2.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// A process.
    Process,
    /// A container under runc with such a process.
    Container,
}

/// Both processes.
pub(crate) struct Talkers<'a> {
    bed: &'a Bed,
    what: What,
    /// The mover's process at guest 1, before the move.
    pub(crate) mover: Place<'a>,
    partner: Place<'a>,
}

impl<'a> Talkers<'a> {
    /// Starts both processes and connects them. `variant` is the traffic of processes outside of containers.
    ///
    /// # Errors
    /// If they do not connect; the error has their output.
    pub(crate) fn start(bed: &'a Bed, what: What, variant: &Variant) -> io::Result<Self> {
        let (mover, partner) = match what {
            What::Process => {
                let (first, second) = checking::start(bed, variant)?;
                (first.place(bed), second.place(bed))
            }
            What::Container => start_container(bed)?,
        };
        connected(mover)?;
        connected(partner)?;
        Ok(Self {
            bed,
            what,
            mover,
            partner,
        })
    }

    /// Begins the move to guest 2; returns the id.
    ///
    /// # Errors
    /// The node's refusal.
    pub(crate) fn begin_move(&self) -> io::Result<String> {
        let (source, destination) = (self.mover.guest, self.bed.guest(2));
        match self.what {
            What::Process => detach_move(self.mover, destination, ALIAS, self.log()),
            What::Container => detach_container_move(
                source,
                CONTAINER,
                destination,
                container::ALIAS,
                &format!("/{}", self.log()),
            ),
        }
    }

    /// Returns the mover's process in this guest if it exists, working or not: a hanging process is one too many.
    ///
    /// # Errors
    /// If the guest does not say.
    pub(crate) fn at(&self, number: usize) -> io::Result<Option<Place<'a>>> {
        let guest = self.bed.guest(number);
        let pid = match self.what {
            What::Process => {
                let place = Place {
                    guest,
                    pid: self.mover.pid,
                };
                place.exists()?.then_some(place.pid)
            }
            What::Container => container::exists(guest, CONTAINER)?,
        };
        Ok(pid.map(|pid| Place { guest, pid }))
    }

    /// Tells the mover, now at `there`, to end, and waits for both.
    ///
    /// # Errors
    /// If they do not end, or one of their checks failed.
    pub(crate) fn end(&self, there: Place<'_>) -> io::Result<()> {
        let ends = match self.what {
            What::Process => ENDS.to_owned(),
            What::Container => format!("{BUNDLES}/{CONTAINER}/rootfs/ends"),
        };
        there.guest.must(&format!("touch {ends}"))?;
        checked_end(there, self.log())?;
        checked_end(self.partner, "run/client.log").map(drop)
    }

    /// Returns the path of the mover's output, without a leading slash.
    fn log(&self) -> &'static str {
        match self.what {
            What::Process => "run/server.log",
            What::Container => "run/bundles/checker/rootfs/out.log",
        }
    }
}

fn start_container(bed: &Bed) -> io::Result<(Place<'_>, Place<'_>)> {
    container::prepare(bed)?;
    let (source, other) = (bed.guest(1), bed.guest(3));
    for guest in [source, bed.guest(2)] {
        let script = "exec /opt/godwit/godwit-verbs-client --events --until /ends >/out.log 2>&1";
        container::bundle(guest, CONTAINER, script, container::OWN)?;
    }
    let alias = container::ALIAS;
    source.must(&format!(
        "ip addr add {alias}/24 dev eth0; arping -q -U -c 1 -I eth0 {alias} >/dev/null 2>&1; true"
    ))?;
    let pid = container::start(source, CONTAINER)?;
    let command = format!(
        "env LD_PRELOAD=/opt/godwit/libgodwit_verbs.so godwit-verbs-client --events {alias}"
    );
    let client = other.background("client", &command)?;
    Ok((
        Place { guest: source, pid },
        Place {
            guest: other,
            pid: client,
        },
    ))
}
