//! Link measurements on the way to the destination while a migration leaves.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use godwit_core::units::Time;
use godwit_core::{Controller, LinkSignal};

use crate::engine::connections::Connections;
use crate::engine::peers::links::Moves;
use crate::engine::run::Engine;
use godwit_io::stream::Stream;

impl Moves {
    /// Measures the sync connection. Ends the measurements once there is no connection.
    fn look(&mut self, now: Time, connections: &Connections) -> Option<LinkSignal> {
        let links = self.links.as_mut()?;
        let sync = links.sync().and_then(|key| connections.get(key));
        if sync.is_none() {
            links.watch = None;
        }
        Some(links.watch.as_mut()?.look(now, &sync?.stream))
    }
}

impl Engine {
    /// Reports the state of the sync connection to the controller, once due.
    pub(in crate::engine) fn sample_link(&mut self) {
        let now = self.cx.now;
        if self.moves.next_look().is_none_or(|next| next > now) {
            return;
        }
        let Some(signal) = self.moves.look(now, &self.connections) else {
            return;
        };
        self.cx.core.handle_link_signal(now, signal);
        self.drain();
        self.moves.watch_copies(now, &self.connections);
    }
}

/// A counter of the bytes sent by a network interface.
#[derive(Debug)]
pub struct InterfaceCounter {
    file: File,
}

impl InterfaceCounter {
    /// Opens the counter of the interface with this name.
    ///
    /// # Errors
    /// There is no such interface.
    pub fn open(interface: &str) -> io::Result<Self> {
        if interface.is_empty() || interface.starts_with('.') || interface.contains('/') {
            return Err(io::ErrorKind::NotFound.into());
        }
        let interfaces = Path::new("/sys/class/net");
        File::open(interfaces.join(interface).join("statistics/tx_bytes")).map(Self::from)
    }

    /// Returns the bytes so far; `None` if the interface is gone.
    fn read(&self) -> Option<u64> {
        let mut text = [0; 32];
        let length = self.file.read_at(&mut text, 0).ok()?;
        std::str::from_utf8(&text[..length])
            .ok()?
            .trim()
            .parse()
            .ok()
    }
}

impl From<File> for InterfaceCounter {
    /// Uses a file that holds the number of bytes as decimal digits.
    fn from(file: File) -> Self {
        Self { file }
    }
}

/// Measures the sync connection, which carries double writes, every [`Controller::LINK_SAMPLING`].
pub(in crate::engine) struct LinkWatch {
    next: Time,
    /// Bytes acknowledged by the other node at the last measurement.
    acknowledged: Option<u64>,
    interface: Option<InterfaceRate>,
}

impl LinkWatch {
    pub(in crate::engine) fn new(now: Time, interface: Option<InterfaceCounter>) -> Self {
        let interface = interface.map(|counter| InterfaceRate {
            counter,
            last: None,
            moved: 0,
            rate: 0,
        });
        Self {
            next: now,
            acknowledged: None,
            interface,
        }
    }

    /// Returns the time of the next measurement.
    pub(in crate::engine) const fn next(&self) -> Time {
        self.next
    }

    fn look(&mut self, now: Time, stream: &Stream) -> LinkSignal {
        self.next = now.after(Controller::LINK_SAMPLING);
        let socket = stream.socket();
        let info = tcp_info(socket).unwrap_or_default();
        let before = self.acknowledged.replace(info.bytes_acked);
        // The kernel keeps a rate until the next measurement: without progress the rate is old. A rate limited by the
        // sender says nothing about the link.
        let moves = before.is_none_or(|before| before < info.bytes_acked);
        let limited_by_us = info.limits & DELIVERY_RATE_APP_LIMITED != 0;
        LinkSignal {
            queued: stream.unsent() as u64 + unacknowledged(socket),
            round_trip: Duration::from_micros(u64::from(info.rtt)),
            delivery_rate: if moves && !limited_by_us {
                info.delivery_rate
            } else {
                0
            },
            interface_rate: self
                .interface
                .as_mut()
                .and_then(|interface| interface.rate(now)),
        }
    }
}

/// The bytes per second sent by an interface.
struct InterfaceRate {
    counter: InterfaceCounter,
    /// Time and value of the counter's last change.
    last: Option<(Time, u64)>,
    /// Growth at the last change.
    moved: u64,
    /// Rate up to the last change.
    rate: u64,
}

impl InterfaceRate {
    /// Returns the rate by now. Some drivers update the counter only every now and then: while the counter stands
    /// still, the rate falls no faster than if as much had been sent since as at the last change.
    fn rate(&mut self, now: Time) -> Option<u64> {
        let bytes = self.counter.read()?;
        let Some((then, before)) = self.last else {
            self.last = Some((now, bytes));
            return Some(0);
        };
        let elapsed = now.since(then);
        if bytes != before {
            self.moved = bytes.saturating_sub(before);
            self.rate = per_second(self.moved, elapsed);
            self.last = Some((now, bytes));
            return Some(self.rate);
        }
        Some(self.rate.min(per_second(self.moved, elapsed)))
    }
}

fn per_second(bytes: u64, elapsed: Duration) -> u64 {
    let rate = u128::from(bytes) * 1_000_000_000 / elapsed.as_nanos().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

/// Returns the bytes in the socket that the other side has not acknowledged.
fn unacknowledged(socket: BorrowedFd<'_>) -> u64 {
    let mut count: libc::c_int = 0;
    // SAFETY: the socket is open, and the request stores one integer at the pointer.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut count) };
    if result == 0 {
        u64::try_from(count).unwrap_or(0)
    } else {
        0
    }
}

/// Flag: `delivery_rate` is limited by the sender, not by the link.
const DELIVERY_RATE_APP_LIMITED: u8 = 1;

/// The start of the kernel's `struct tcp_info`, as far as used here. The kernel cuts its own structure to the requested
/// length.
#[repr(C)]
#[derive(Default)]
struct TcpInfo {
    state_to_wscale: [u8; 7],
    limits: u8,
    rto_to_rcv_ssthresh: [u32; 15],
    /// Smoothed round trip in microseconds.
    rtt: u32,
    rttvar_to_total_retrans: [u32; 8],
    pacing_rates: [u64; 2],
    bytes_acked: u64,
    bytes_received: u64,
    segs_out_to_data_segs_out: [u32; 6],
    /// Bytes per second.
    delivery_rate: u64,
    /// Microseconds with data to send, and the part of them in which the receiver took no more.
    busy_time: u64,
    rwnd_limited: u64,
}

/// The totals sent on a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::engine) struct Sent {
    /// Bytes acknowledged by the other side.
    pub(in crate::engine) bytes: u64,
    /// Time with data to send, without the time in which the other side took no more.
    pub(in crate::engine) time: Duration,
}

/// Returns the totals sent on this connection; `None` if not TCP.
pub(in crate::engine) fn sent(socket: BorrowedFd<'_>) -> Option<Sent> {
    let info = tcp_info(socket)?;
    Some(Sent {
        bytes: info.bytes_acked,
        time: Duration::from_micros(info.busy_time.saturating_sub(info.rwnd_limited)),
    })
}

fn tcp_info(socket: BorrowedFd<'_>) -> Option<TcpInfo> {
    let mut info = TcpInfo::default();
    let mut length = size_of::<TcpInfo>() as libc::socklen_t;
    // SAFETY: the socket is open; the kernel fills at most `length` bytes at `info`, for whose integers every pattern
    // of bits is a value.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    (result == 0).then_some(info)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use godwit_io::stream::Frame;

    const MS: u64 = 1_000_000;

    fn counter(directory: &Path) -> (impl Fn(u64) + use<>, InterfaceCounter) {
        let path = directory.join("tx_bytes");
        let write = move |bytes: u64| std::fs::write(&path, format!("{bytes}\n")).expect("written");
        write(0);
        let file = File::open(directory.join("tx_bytes")).expect("the file");
        (write, file.into())
    }

    fn sockets() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let ours =
            TcpStream::connect(listener.local_addr().expect("an address")).expect("to connect");
        (ours, listener.accept().expect("to accept").0)
    }

    #[test]
    fn fields_lie_where_the_kernel_puts_them() {
        use std::mem::offset_of;
        assert_eq!(
            offset_of!(TcpInfo, rtt),
            offset_of!(libc::tcp_info, tcpi_rtt)
        );
        assert_eq!(
            offset_of!(TcpInfo, bytes_acked),
            offset_of!(libc::tcp_info, tcpi_bytes_acked)
        );
        assert_eq!(
            offset_of!(TcpInfo, delivery_rate),
            offset_of!(libc::tcp_info, tcpi_delivery_rate)
        );
    }

    #[test]
    fn what_the_other_side_has_not_read_is_queued() {
        let (mut ours, mut theirs) = sockets();
        let mut stream =
            Stream::new(ours.try_clone().expect("a clone").into(), None, &[]).expect("a stream");
        let mut watch = LinkWatch::new(Time(0), None);
        assert_eq!(watch.look(Time(0), &stream).queued, 0);
        assert_eq!(watch.next(), Time(10 * MS));
        // A frame that waits here counts, too.
        stream.queue(Frame::new(&[&[0; 40]], None));
        assert_eq!(watch.look(Time(10 * MS), &stream).queued, 40);
        ours.set_nonblocking(true).expect("set");
        let mut filled = 0;
        while let Ok(count) = ours.write(&[1; 65_536]) {
            filled += count;
        }
        let full = watch.look(Time(20 * MS), &stream);
        assert!(
            (65_536..=filled as u64 + 40).contains(&full.queued),
            "{full:?} of {filled}"
        );
        assert!(!full.round_trip.is_zero() && full.round_trip < Duration::from_secs(1));
        let mut data = vec![0; filled];
        theirs.read_exact(&mut data).expect("the data");
        let patience = std::time::Instant::now() + Duration::from_secs(10);
        while watch.look(Time(30 * MS), &stream).queued > 40 {
            assert!(std::time::Instant::now() < patience, "never acknowledged");
            std::thread::sleep(Duration::from_millis(1));
        }
        // Nothing moved since the last measurement: no rate is known.
        assert_eq!(watch.look(Time(40 * MS), &stream).delivery_rate, 0);
    }

    #[test]
    fn the_rate_of_an_interface_follows_its_counter() {
        let directory = tempfile::tempdir().expect("a directory");
        let (write, counter) = counter(directory.path());
        write(1 << 30);
        let mut watch = LinkWatch::new(Time(0), Some(counter));
        let interface = watch.interface.as_mut().expect("watched");
        assert_eq!(interface.rate(Time(0)), Some(0));
        write((1 << 30) + 1_000_000);
        assert_eq!(interface.rate(Time(10 * MS)), Some(100_000_000));
        // The counter stands still: the rate falls as time passes.
        assert_eq!(interface.rate(Time(20 * MS)), Some(100_000_000));
        assert_eq!(interface.rate(Time(60 * MS)), Some(20_000_000));
        // A driver that counts every 100 ms.
        write((1 << 30) + 2_000_000);
        assert_eq!(interface.rate(Time(110 * MS)), Some(10_000_000));
        // The counter starts again.
        write(5);
        assert_eq!(interface.rate(Time(120 * MS)), Some(0));
    }

    #[test]
    fn an_interface_that_is_gone_has_no_rate() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("tx_bytes");
        std::fs::write(&path, "").expect("written");
        let counter = InterfaceCounter::from(File::open(path).expect("the file"));
        let mut watch = LinkWatch::new(Time(0), Some(counter));
        let interface = watch.interface.as_mut().expect("watched");
        assert_eq!(interface.rate(Time(0)), None);
    }

    #[test]
    fn only_interfaces_have_counters() {
        assert!(InterfaceCounter::open("lo").expect("loopback").read() > Some(0));
        for name in ["", ".", "..", "lo/../lo", "no-such-if"] {
            let error = InterfaceCounter::open(name).expect_err(name);
            assert_eq!(error.kind(), io::ErrorKind::NotFound, "{name}");
        }
    }
}
