//! The reconnect option of a character device: in milliseconds since QEMU 9.2, in seconds before.

use super::words::field;
use crate::version::Version;

const MILLISECONDS: &str = "reconnect-ms";
const SECONDS: &str = "reconnect";

/// Returns a character device's options in the form for this version of QEMU. Less than a second becomes one: 0 would
/// disable reconnection.
pub(super) fn for_version(options: &str, qemu: Version) -> String {
    let milliseconds = qemu >= Version::RECONNECT_MS;
    let (from, to) = match milliseconds {
        true => (SECONDS, MILLISECONDS),
        false => (MILLISECONDS, SECONDS),
    };
    let found = field(options, from).and_then(|(at, value)| Some((at, value.parse::<u64>().ok()?)));
    let Some(((start, end), value)) = found else {
        return options.to_owned();
    };
    let value = match milliseconds {
        true => value.saturating_mul(1000),
        false => value.div_ceil(1000),
    };
    let before = &options[..start - from.len() - 1];
    format!("{before}{to}={value}{}", &options[end..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_qemu_gets_the_unit_it_knows() {
        let (old, new) = (Version([7, 2, 22]), Version([9, 2, 0]));
        for (given, to_old, to_new) in [
            (",reconnect-ms=100", ",reconnect=1", ",reconnect-ms=100"),
            (
                ",reconnect-ms=2500,id=d",
                ",reconnect=3,id=d",
                ",reconnect-ms=2500,id=d",
            ),
            (
                "socket,reconnect=2,path=",
                "socket,reconnect=2,path=",
                "socket,reconnect-ms=2000,path=",
            ),
            (",reconnect-ms=0", ",reconnect=0", ",reconnect-ms=0"),
            (",server=off", ",server=off", ",server=off"),
            (",reconnect=soon", ",reconnect=soon", ",reconnect=soon"),
        ] {
            assert_eq!(for_version(given, old), to_old);
            assert_eq!(for_version(given, new), to_new);
        }
    }
}
