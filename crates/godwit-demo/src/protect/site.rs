//! Two nodes and their witness on one network, the machine with the services, and the clients outside.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use godwit_testkit::cluster::ClusterOptions;
use godwit_testkit::network::{Lan, Postgres, Records, Redis, Requests, Service, Stored};
use godwit_testkit::process::{end_machines_of, wait_for};
use godwit_testkit::report::step;
use godwit_testkit::vm::{GuestNetwork, NodeGuest, VM};
use godwit_testkit::{Cluster, Node};
use serde_json::Value;

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 10);
/// Longest wait for any state of the machine: a boot on an emulated processor, or a copy of the disk.
const PATIENCE: Duration = Duration::from_secs(180);
/// Time between two looks at a machine.
const LOOK: Duration = Duration::from_millis(20);
/// Clients of the web server, and the time between two requests of one of them. TCP repeats a request that died with
/// the host after 0.2, 0.6, 1.4, 3.0 s, and so on: with this many clients, some request is repeated at every moment.
const WEB_CLIENTS: u32 = 40;
const WEB_EVERY: Duration = Duration::from_secs(2);
/// Time between two records.
const RECORD_EVERY: Duration = Duration::from_millis(50);

/// The clients of the three services.
#[derive(Debug)]
pub(super) struct Clients {
    web: Requests,
    redis: Records,
    postgres: Records,
}

impl Clients {
    fn start(lan: &Lan) -> Self {
        let server = |port| SocketAddr::from((GUEST, port));
        let from = lan.switch();
        Self {
            web: Requests::start(from, server(80), WEB_CLIENTS, WEB_EVERY),
            redis: Redis::start(from, server(6379), RECORD_EVERY),
            postgres: Postgres::start(from, server(5432), RECORD_EVERY),
        }
    }

    /// Returns the view of the clients of nginx, Redis and PostgreSQL between two moments in the past.
    pub(super) fn between(&self, from: Instant, to: Instant) -> [Service; 3] {
        [
            self.web.between(from, to),
            self.redis.between(from, to),
            self.postgres.between(from, to),
        ]
    }

    /// Returns the number of broken connections so far.
    pub(super) fn broken(&self) -> u32 {
        self.web.broken() + self.redis.broken() + self.postgres.broken()
    }

    /// Reads all records back.
    pub(super) fn check(&self) -> io::Result<Stored> {
        let (redis, postgres) = (self.redis.check()?, self.postgres.check()?);
        Ok(Stored {
            answered: redis.answered + postgres.answered,
            lost: redis.lost + postgres.lost,
            wrong: redis.wrong + postgres.wrong,
        })
    }
}

pub(super) struct Site {
    pub(super) clients: Clients,
    guest: NodeGuest,
    /// Boots so far.
    boots: usize,
    cluster: Cluster,
    /// The node of the machine, and its backup.
    pub(super) from: &'static str,
    pub(super) to: &'static str,
    _lan: Lan,
}

impl Site {
    /// Starts the nodes, the machine at node a, and the clients.
    pub(super) fn start() -> io::Result<Self> {
        step("starting two nodes and their witness, and a machine with services at node a");
        let lan = Lan::new(3)?;
        let hosts: Vec<_> = ["a", "b", "c"]
            .into_iter()
            .zip(lan.hosts().iter().map(Some))
            .collect();
        let mut cluster = Cluster::prepare_on(&hosts, ClusterOptions::release()?)?;
        cluster.start_all()?;
        let network = GuestNetwork {
            nic: format!("tap={}", Lan::TAP),
            address: format!("{GUEST}/24"),
            ..GuestNetwork::default()
        };
        let guest = NodeGuest::start_services(&cluster, "a", network)?;
        let site = Self {
            clients: Clients::start(&lan),
            guest,
            boots: 1,
            cluster,
            from: "a",
            to: "b",
            _lan: lan,
        };
        site.answers_after(Instant::now())?;
        Ok(site)
    }

    /// Has the other node protect the machine, with these options.
    pub(super) fn protect(&self, how: &[&str]) -> io::Result<()> {
        step(&format!("protecting the machine: {}", how.join(" ")));
        let command = ["vm", "protect", VM, "--to", self.to, "--witness", "node:c"];
        let node = self.cluster.node(self.from);
        node.godwit(&[&command, how].concat()).json()?;
        Ok(())
    }

    /// Waits until both nodes show the machine as protected.
    pub(super) fn is_protected(&self) -> io::Result<()> {
        for node in [self.from, self.to].map(|name| self.cluster.node(name)) {
            let reached = || (node.vm(VM)["protection"]["state"] == "protected").then_some(());
            wait_for(PATIENCE, reached)
                .ok_or_else(|| failed(node, "does not protect the machine"))?;
        }
        Ok(())
    }

    /// Returns the protection as the machine's node shows it.
    pub(super) fn protection(&self) -> Value {
        self.cluster.node(self.from).vm(VM)["protection"].take()
    }

    /// Kills the machine's node and QEMU.
    pub(super) fn kill_host(&mut self) -> Instant {
        step(&format!("killing node {} and its QEMU", self.from));
        let died = Instant::now();
        let host = self.cluster.node_mut(self.from);
        host.kill();
        end_machines_of(&host.spec().dir);
        died
    }

    /// Starts the killed node again, which becomes the backup.
    pub(super) fn host_returns(&mut self) -> io::Result<()> {
        self.cluster.node_mut(self.from).start(&[])?;
        (self.from, self.to) = (self.to, self.from);
        Ok(())
    }

    /// Waits until each service has answered a client after this moment and the answers that were on their way then.
    pub(super) fn answers_after(&self, moment: Instant) -> io::Result<()> {
        let from = moment + Duration::from_millis(500);
        let answered = || {
            let seen = self.clients.between(from, Instant::now());
            seen.iter().all(|seen| seen.answers > 0).then_some(())
        };
        wait_for(PATIENCE, answered).ok_or_else(|| {
            let seen = self.clients.between(from, Instant::now());
            let node = self.cluster.node(self.to);
            failed(node, &format!("leaves clients without answers ({seen:?})"))
        })
    }

    /// Waits until the machine runs at the other node.
    pub(super) fn runs_elsewhere(&self) -> io::Result<Instant> {
        let node = self.cluster.node(self.to);
        let runs = wait_for(PATIENCE, || {
            std::thread::sleep(LOOK);
            (node.vm_state(VM) == "running").then(Instant::now)
        });
        runs.ok_or_else(|| failed(node, "does not run the machine"))
    }

    /// Waits until the services of a new boot are ready.
    pub(super) fn booted_again(&mut self) -> io::Result<Instant> {
        self.guest.console.booted_again(self.boots, PATIENCE)?;
        self.boots += 1;
        Ok(Instant::now())
    }

    /// Ends the protection, and the machine.
    pub(super) fn end(self) -> io::Result<()> {
        let node = self.cluster.node(self.from);
        node.godwit(&["vm", "unprotect", VM]).text()?;
        node.godwit(&["vm", "stop", VM, "--force"]).text()?;
        Ok(())
    }
}

fn failed(node: &Node, what: &str) -> io::Error {
    let (name, shown) = (node.name(), node.vm(VM));
    io::Error::other(format!(
        "node {name} {what}: {shown}\n{}",
        node.log_tail(30)
    ))
}
