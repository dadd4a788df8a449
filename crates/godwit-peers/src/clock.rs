//! Points in time as the API shows them.

use time::OffsetDateTime;

/// Returns the present time, in UTC and RFC 3339 with milliseconds.
pub fn now_text() -> String {
    text(OffsetDateTime::now_utc())
}

/// Formats seconds since 1970 like [`now_text`]. A number without a date is shown as the number.
pub(crate) fn text_of(seconds: i64) -> String {
    OffsetDateTime::from_unix_timestamp(seconds).map_or_else(|_| seconds.to_string(), text)
}

fn text(at: OffsetDateTime) -> String {
    format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z",
        at.year(),
        u8::from(at.month()),
        at.day(),
        at.hour(),
        at.minute(),
        at.second(),
        at.millisecond()
    )
}

/// Returns the processor time that this process has used, in seconds.
pub fn process_cpu_seconds() -> f64 {
    let mut used = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes only to the given timespec, which lives until the call returns. The call cannot fail for
    // this clock; after a failure the zeroes would stay.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut used) };
    used.tv_sec as f64 + used.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rfc_3339() {
        let at = OffsetDateTime::UNIX_EPOCH + time::Duration::milliseconds(1_700_000_000_042);
        assert_eq!(text(at), "2023-11-14T22:13:20.042Z");
    }
}
