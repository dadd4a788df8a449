//! The sandbox of a started QEMU: limits the gain of a guest after breaking in.

/// Returns the words for the sandbox of a QEMU with this command line; none if the line has its own. Requirements of
/// the line stay allowed: helpers of networks, another user, threads bound to processors.
pub fn words(line: &[String]) -> Vec<String> {
    let has = |option: &str| {
        line.iter().any(|word| {
            word.strip_prefix('-')
                .unwrap_or(word)
                .trim_start_matches('-')
                == option
        })
    };
    if has("sandbox") {
        return Vec::new();
    }
    let deny = |name, denied| format!("{name}={}", if denied { "deny" } else { "allow" });
    let privileges = match has("runas") || has("run-with") {
        // QEMU itself changes to another user; child processes may not.
        true => "elevateprivileges=children",
        false => "elevateprivileges=deny",
    };
    let threads_are_bound = line.iter().any(|word| word.starts_with("thread-context"));
    let options = [
        "on,obsolete=deny",
        privileges,
        &deny("spawn", !line.iter().any(|word| starts_programs(word))),
        &deny("resourcecontrol", !threads_are_bound),
    ];
    vec![String::from("-sandbox"), options.join(",")]
}

/// Returns true if QEMU starts a program for this word: the helper of a bridge, the scripts of a tap, a server for the
/// guest, or a command for a migration.
fn starts_programs(word: &str) -> bool {
    let mut parts = word.split(',');
    let kind = parts.next().unwrap_or_default();
    let parts: Vec<&str> = parts.collect();
    let given = |start: &str| parts.iter().any(|part| part.starts_with(start));
    match kind {
        "bridge" => true,
        "tap" => {
            let opened = given("fd=") || given("fds=");
            given("helper=") || !(opened || given("script=no") && given("downscript=no"))
        }
        "user" => given("smb=") || given("guestfwd="),
        _ => kind.starts_with("exec:"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(line: &[&str]) -> String {
        let line: Vec<_> = line.iter().map(|&word| word.to_owned()).collect();
        words(&line).join(" ")
    }

    #[test]
    fn everything_is_denied_that_the_machine_does_not_need() {
        let all =
            "-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
        for line in [
            &["-S"][..],
            &["-netdev", "user,id=n"],
            &["-netdev", "tap,id=n,script=no,downscript=no"],
            &["-netdev", "tap,id=n,fd=3"],
            &["-name", "bridge-head"],
        ] {
            assert_eq!(put(line), all, "{line:?}");
        }
        for line in [
            &["-netdev", "bridge,id=n"][..],
            &["-nic", "tap"],
            &["-netdev", "tap,id=n,script=no"],
            &["-nic", "user,smb=/srv"],
        ] {
            assert!(put(line).contains("spawn=allow"), "{line:?}");
        }
        assert!(put(&["-runas", "x"]).contains("elevateprivileges=children"));
        let bound = ["-object", "thread-context,id=t"];
        assert!(put(&bound).contains("resourcecontrol=allow"));
    }

    #[test]
    fn a_sandbox_of_ones_own_is_kept() {
        assert_eq!(put(&["-sandbox", "off"]), "");
        assert_eq!(put(&["--sandbox", "on"]), "");
    }
}
