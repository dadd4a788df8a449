//! Lines on the serial console. Each line is one write, so that lines of several threads do not mix.

use std::io::{self, Write};

/// Prints a line. A console without a reader must not stop the load: errors are ignored.
pub(crate) fn say(line: &str) {
    let mut text = String::with_capacity(line.len() + 1);
    text.push_str(line);
    text.push('\n');
    let mut out = io::stdout().lock();
    // Standard output is line buffered: the flush sends the line in one piece.
    let _ = out.write_all(text.as_bytes());
    let _ = out.flush();
}

/// Prints `{"NAME":"TEXT"}`.
pub(crate) fn say_text(name: &str, text: &str) {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '"' | '\\' => escaped.extend(['\\', letter]),
            letter if letter.is_control() => escaped.push(' '),
            letter => escaped.push(letter),
        }
    }
    say(&format!("{{\"{name}\":\"{escaped}\"}}"));
}

/// Waits until everything printed has left the serial line.
pub(crate) fn drain() {
    let _ = rustix::termios::tcdrain(io::stdout());
}
