//! The user of QEMU, if not the node's own: a guest that breaks out into QEMU then has neither the node's keys nor its
//! images.

use std::ffi::CString;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use nix::unistd::{Gid, Uid, User, getgrouplist, setgroups, setresgid, setresuid};

/// A user of this host, with its groups.
#[derive(Clone, Debug)]
pub struct QemuUser {
    name: String,
    user: Uid,
    group: Gid,
    groups: Vec<Gid>,
}

impl QemuUser {
    /// Returns the user's number on this host.
    pub fn number(&self) -> u32 {
        self.user.as_raw()
    }

    /// Looks up the user of this name.
    ///
    /// # Errors
    /// The obstacle, as a sentence: there is none, it is root, or the host cannot say.
    pub fn named(name: &str) -> Result<Self, String> {
        let found = User::from_name(name).map_err(|error| format!("cannot look it up: {error}"))?;
        let found = found.ok_or("this host has no such user")?;
        if found.uid.is_root() {
            return Err(String::from(
                "it is root, from whom nothing on this host is kept",
            ));
        }
        let terminated = CString::new(name).map_err(|_| "it has a zero byte in it")?;
        let groups = getgrouplist(&terminated, found.gid)
            .map_err(|error| format!("cannot look up its groups: {error}"))?;
        Ok(Self {
            name: found.name,
            user: found.uid,
            group: found.gid,
            groups,
        })
    }

    /// Returns the user's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns true if this process may start programs as other users.
    pub fn may_be_used() -> bool {
        Uid::effective().is_root()
    }

    /// Lets a program run as the user.
    pub fn run_as(&self, command: &mut Command) {
        let (user, group, groups) = (self.user, self.group, self.groups.clone());
        // SAFETY: between fork and exec only system calls are made, which allocate nothing and take no lock.
        unsafe {
            command.pre_exec(move || {
                setgroups(&groups)?;
                setresgid(group, group, group)?;
                setresuid(user, user, user)?;
                Ok(())
            });
        }
    }

    /// Gives the user a file or folder.
    pub fn own(&self, path: &Path) -> io::Result<()> {
        // Does not follow links, which the user may have put there.
        std::os::unix::fs::lchown(path, Some(self.user.as_raw()), Some(self.group.as_raw()))
    }

    /// Returns true if a file's mode lets the user read and write.
    pub fn may_write(&self, path: &Path) -> bool {
        let Ok(file) = std::fs::metadata(path) else {
            return false;
        };
        let shift = if file.uid() == self.user.as_raw() {
            6
        } else if self.groups.iter().any(|group| group.as_raw() == file.gid()) {
            3
        } else {
            0
        };
        file.mode() >> shift & 0o6 == 0o6
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_users_that_can_be_kept_from_something_are_taken() {
        let refused = |name| QemuUser::named(name).expect_err("refused");
        assert!(refused("root").contains("root"));
        assert!(refused("no such user").contains("no such user"));
        let nobody = QemuUser::named("nobody").expect("every host has it");
        assert_eq!(nobody.name(), "nobody");
        assert!(!nobody.user.is_root());
    }

    #[test]
    fn a_file_is_for_its_owner_a_group_or_all() {
        let nobody = QemuUser::named("nobody").expect("every host has it");
        let file = tempfile::NamedTempFile::new().expect("a file");
        let own = file.as_file().metadata().expect("metadata");
        let as_group = QemuUser {
            groups: vec![Gid::from_raw(own.gid())],
            ..nobody.clone()
        };
        let as_owner = QemuUser {
            user: Uid::from_raw(own.uid()),
            ..nobody.clone()
        };
        for (mode, owner, group, other) in [
            (0o600, true, false, false),
            (0o660, true, true, false),
            (0o666, true, true, true),
            (0o444, false, false, false),
        ] {
            std::fs::set_permissions(file.path(), Permissions::from_mode(mode)).expect("set");
            let may = [&as_owner, &as_group, &nobody].map(|user| user.may_write(file.path()));
            assert_eq!(may, [owner, group, other], "{mode:o}");
        }
        assert!(!nobody.may_write(Path::new("/nowhere")));
    }
}
