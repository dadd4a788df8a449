//! DPDK's testpmd as the driver of a vhost-user NIC (its `virtio_user` device): a foreign front end. testpmd writes
//! every frame from the NIC to a file, and sends the frames of another file.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::process::Process;

/// Longest time for testpmd to close its files.
const END: Duration = Duration::from_secs(20);

/// Bytes of a pcap file's header, and of each frame's.
const FILE_HEADER: usize = 24;
const FRAME_HEADER: usize = 16;

/// A testpmd that drives a NIC.
#[derive(Debug)]
pub struct Testpmd {
    process: Process,
    /// Capture file of each queue pair.
    received: Vec<PathBuf>,
    log: PathBuf,
}

impl Testpmd {
    /// Connects a testpmd to the NIC at this socket, with a queue pair for each list of frames. The pair sends the list
    /// at once, so the list must fit the pair's ring. Files are in `folder`, and their names begin with `name`.
    pub fn start(
        socket: &Path,
        folder: &Path,
        name: &str,
        sends: &[Vec<Vec<u8>>],
    ) -> io::Result<Self> {
        let file = |end: &str| folder.join(format!("{name}.{end}"));
        let (mut files, mut received) = (String::from("net_pcap0"), Vec::new());
        for (pair, frames) in sends.iter().enumerate() {
            let sent = file(&format!("sent{pair}.pcap"));
            std::fs::write(&sent, pcap(frames))?;
            let gets = file(&format!("received{pair}.pcap"));
            files += &format!(",rx_pcap={},tx_pcap={}", sent.display(), gets.display());
            received.push(gets);
        }
        let queues = sends.len().to_string();
        let log = file("log");
        // With several pairs the driver wants a control queue, which it answers itself.
        let nic = format!(
            "virtio_user0,path={},queues={queues},queue_size=256,cq=1",
            socket.display()
        );
        let prefix = format!("godwit-{}-{name}", std::process::id());
        // testpmd writes a farewell to a NIC that may already be gone.
        let mut command = Command::new("env");
        command
            .args(["--ignore-signal=PIPE", "dpdk-testpmd"])
            .args(["--no-huge", "-m", "96", "--no-pci", "--no-shconf"])
            .args(["--no-telemetry", "-l", "0,1", "--file-prefix", &prefix])
            .args(["--vdev", &nic, "--vdev", &files])
            .args([
                "--",
                "--forward-mode=io",
                "--no-flush-rx",
                "--total-num-mbufs=8192",
            ])
            .args(["--rxq", &queues, "--txq", &queues]);
        let output = File::create(&log)?;
        command
            .stdin(Stdio::piped())
            .stdout(output.try_clone()?)
            .stderr(output);
        Ok(Self {
            process: Process::spawn(&mut command)?,
            received,
            log,
        })
    }

    /// Returns the output so far.
    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends testpmd, and returns every frame received from the NIC, in order, pair by pair.
    pub fn finish(mut self) -> io::Result<Vec<Vec<u8>>> {
        // testpmd ends when its standard input does.
        drop(self.process.child().stdin.take());
        let status = self.process.wait(END)?;
        if !status.success() {
            let said = self.said();
            return Err(io::Error::other(format!("testpmd {status}:\n{said}")));
        }
        let mut all = Vec::new();
        for file in &self.received {
            all.extend(frames(&std::fs::read(file)?)?);
        }
        Ok(all)
    }
}

fn pcap(frames: &[Vec<u8>]) -> Vec<u8> {
    let words =
        |words: &[u32]| -> Vec<u8> { words.iter().flat_map(|word| word.to_le_bytes()).collect() };
    // Version 2.4, 64 KiB of each frame, Ethernet.
    let mut file = words(&[0xa1b2_c3d4, 2 | 4 << 16, 0, 0, 1 << 16, 1]);
    for frame in frames {
        let length = frame.len() as u32;
        file.extend(words(&[0, 0, length, length]));
        file.extend(frame);
    }
    file
}

/// Returns the frames of a pcap file in this machine's byte order.
fn frames(mut file: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let cut = || io::Error::other("a pcap file is cut off");
    file = file.get(FILE_HEADER..).ok_or_else(cut)?;
    let mut frames = Vec::new();
    while !file.is_empty() {
        let (header, rest) = file.split_at_checked(FRAME_HEADER).ok_or_else(cut)?;
        let length = header[8..].first_chunk().copied().unwrap_or_default();
        let length = u32::from_le_bytes(length) as usize;
        let (frame, rest) = rest.split_at_checked(length).ok_or_else(cut)?;
        frames.push(frame.to_vec());
        file = rest;
    }
    Ok(frames)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_from_their_file() {
        let sent = vec![vec![1; 60], vec![2; 1514]];
        let file = pcap(&sent);
        assert_eq!(frames(&file).unwrap(), sent);
        assert!(frames(&file[..file.len() - 1]).is_err());
    }
}
