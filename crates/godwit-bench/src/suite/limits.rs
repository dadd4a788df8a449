//! Lower limits of the time of any copy.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use serde_json::Value;

use godwit_testkit::process::run;

/// Bytes sent at once.
const PIECE: usize = 1 << 20;

/// Returns the seconds for fio to read the source and write as many bytes, both at the same time.
pub(crate) fn disk(source: &Path, copy: &Path, bytes: u64) -> io::Result<f64> {
    let output = run(Command::new("fio")
        // Long requests are slower from small pages.
        .env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        .args([
            "--ioengine=io_uring",
            "--direct=1",
            "--bs=1M",
            "--iodepth=16",
        ])
        .arg(format!("--size={bytes}"))
        .args(["--output-format=json", "--name=read", "--rw=read"])
        .arg(format!("--filename={}", source.display()))
        .args(["--name=write", "--rw=write", "--end_fsync=1"])
        .arg(format!("--filename={}", copy.display())))?;
    slowest(&serde_json::from_slice(&output.stdout)?)
        .ok_or_else(|| io::Error::other("fio does not say how long it took"))
}

/// Returns the time of the slowest of fio's jobs in seconds.
fn slowest(report: &Value) -> Option<f64> {
    let jobs = report["jobs"].as_array()?;
    let milliseconds = |job: &Value| {
        let of = |kind: &str| job[kind]["runtime"].as_u64().unwrap_or(0);
        of("read").max(of("write"))
    };
    let slowest = jobs.iter().map(milliseconds).max()?;
    (slowest > 0).then_some(slowest as f64 / 1000.0)
}

/// Returns the seconds for as many bytes through a connection over loopback.
pub(crate) fn loopback(bytes: u64) -> io::Result<f64> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    let receiver = std::thread::spawn(move || -> io::Result<u64> {
        let (mut stream, _) = listener.accept()?;
        let mut buffer = vec![0; PIECE];
        let mut received = 0;
        loop {
            match stream.read(&mut buffer)? {
                0 => return Ok(received),
                count => received += count as u64,
            }
        }
    });
    let mut stream = TcpStream::connect(address)?;
    let buffer = vec![1; PIECE];
    let started = Instant::now();
    let mut left = bytes;
    while left > 0 {
        let piece = left.min(PIECE as u64);
        stream.write_all(&buffer[..piece as usize])?;
        left -= piece;
    }
    drop(stream);
    let received = receiver
        .join()
        .map_err(|_| io::Error::other("the receiver panicked"))??;
    if received != bytes {
        return Err(io::Error::other(format!(
            "{received} of {bytes} bytes went through loopback"
        )));
    }
    Ok(started.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_reading_and_writing_counts() {
        let report = serde_json::json!({"jobs": [
            {"read": {"runtime": 1500}, "write": {"runtime": 0}},
            {"read": {"runtime": 0}, "write": {"runtime": 2500}},
        ]});
        assert_eq!(slowest(&report), Some(2.5));
        assert_eq!(
            slowest(&serde_json::json!({"jobs": [{"read": {"runtime": 0}}]})),
            None
        );
    }

    #[test]
    fn all_bytes_go_through_loopback() {
        assert!(loopback(3 * PIECE as u64 + 5).expect("a connection") > 0.0);
    }
}
