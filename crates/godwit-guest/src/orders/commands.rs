//! Sources of commands to the load: lines on the console, and the machine's power button.

use std::fs::{self, File};
use std::io::{self, BufRead, Read};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use crate::orders::card;
use crate::orders::ending::{self, Ending};
use crate::stats::Stats;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Mark(u64),
    Report,
    Finish,
    /// End of this boot.
    End(Ending),
    /// Number of queue pairs that the first network card shall use.
    Channels(u32),
    /// Attachment of an XDP program that passes every packet to this card.
    Xdp(card::Place),
}

/// Begins to listen. The threads sit in reads until the machine is switched off.
pub(crate) fn listen() -> Receiver<Command> {
    let (sender, receiver) = channel();
    if let Some(button) = power_button() {
        let sender = sender.clone();
        thread::spawn(move || watch(button, &sender));
    }
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            // The receiver is gone after `finish`.
            if let Some(command) = parse(&line)
                && sender.send(command).is_err()
            {
                return;
            }
        }
    });
    receiver
}

/// Obeys commands until told to finish.
pub(crate) fn obey(commands: &Receiver<Command>, stats: &Stats) {
    for command in commands {
        match command {
            Command::Mark(id) => stats.set_mark(id),
            Command::Report => stats.report(),
            Command::End(how) => ending::end(how),
            Command::Channels(pairs) => card::say("channels", card::set_channels(pairs)),
            Command::Xdp(place) => card::say("xdp", card::attach_xdp(place)),
            Command::Finish => return,
        }
    }
}

/// Parses a line; returns `None` for noise, and for half a command of which the rest was lost.
fn parse(line: &str) -> Option<Command> {
    let mut words = line.split_whitespace();
    match words.next()? {
        "mark" => Some(Command::Mark(words.next()?.parse().ok()?)),
        "report" => Some(Command::Report),
        "finish" => Some(Command::Finish),
        "end" => {
            let of_this_boot = words.next()? == ending::boot();
            Ending::of(words.next()?)
                .filter(|_| of_this_boot)
                .map(Command::End)
        }
        "channels" => Some(Command::Channels(words.next()?.parse().ok()?)),
        "xdp" => Some(Command::Xdp(card::Place::of(words.next()?)?)),
        _ => None,
    }
}

/// Returns the event device of the power button that QEMU's `system_powerdown` presses.
fn power_button() -> Option<File> {
    fs::read_dir("/sys/class/input")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("event"))
        .find(|name| {
            let name = format!("/sys/class/input/{name}/device/name");
            fs::read_to_string(name).is_ok_and(|name| name.trim() == "Power Button")
        })
        .and_then(|name| File::open(Path::new("/dev/input").join(name)).ok())
}

/// Sends `Finish` when the button is pressed.
fn watch(mut button: File, commands: &Sender<Command>) {
    // struct input_event on a 64-bit machine: the time, then type, code and value.
    let mut event = [0; 24];
    while button.read_exact(&mut event).is_ok() {
        let (kind, code, value) = (&event[16..18], &event[18..20], &event[20..24]);
        let (key, power, pressed) = (1u16, 116u16, 1u32);
        if kind == key.to_ne_bytes()
            && code == power.to_ne_bytes()
            && value == pressed.to_ne_bytes()
            && commands.send(Command::Finish).is_err()
        {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Command, parse};

    #[test]
    fn half_a_command_is_none() {
        assert_eq!(parse("mark 7"), Some(Command::Mark(7)));
        assert_eq!(parse(" finish\r"), Some(Command::Finish));
        assert_eq!(parse("mark"), None);
        assert_eq!(parse("ma"), None);
        assert_eq!(parse("channels"), None);
        assert_eq!(parse("end another-boot reboot"), None);
        assert_eq!(parse(""), None);
    }
}
