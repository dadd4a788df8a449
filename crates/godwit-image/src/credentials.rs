//! Credentials in a file. Each request reads the file again, so that an operator can replace credentials while a node
//! runs.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;

/// A file in the form of `~/.aws/credentials` and the profile to use.
#[derive(Debug)]
pub(crate) struct CredentialsFile {
    path: PathBuf,
    profile: String,
}

impl CredentialsFile {
    /// Returns the file that the environment names, if any.
    pub(crate) fn of_environment() -> Option<Self> {
        let path =
            std::env::var_os("AWS_SHARED_CREDENTIALS_FILE").filter(|path| !path.is_empty())?;
        let profile = std::env::var("AWS_PROFILE").ok();
        let profile = profile.filter(|profile| !profile.is_empty());
        Some(Self {
            path: path.into(),
            profile: profile.unwrap_or_else(|| String::from("default")),
        })
    }

    /// Returns the current credential in the file.
    ///
    /// # Errors
    /// A sentence: the file cannot be read or has no such profile.
    pub(crate) fn read(&self) -> Result<AwsCredential, String> {
        let shown = self.path.display();
        let text = std::fs::read_to_string(&self.path)
            .map_err(|error| format!("the file of credentials {shown} cannot be read: {error}"))?;
        credential(&text, &self.profile).ok_or_else(|| {
            format!(
                "the file of credentials {shown} has no aws_access_key_id and aws_secret_access_key under [{}]",
                self.profile
            )
        })
    }
}

#[async_trait]
impl CredentialProvider for CredentialsFile {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let read = self.read().map(Arc::new);
        read.map_err(|why| object_store::Error::Unauthenticated {
            path: self.path.display().to_string(),
            source: why.into(),
        })
    }
}

fn credential(text: &str, profile: &str) -> Option<AwsCredential> {
    let mut of_profile = false;
    let (mut id, mut secret, mut token) = (None, None, None);
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            of_profile = section.trim_end_matches(']').trim() == profile;
        } else if let Some((name, value)) = line.split_once('=').filter(|_| of_profile) {
            let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
            match name.trim() {
                "aws_access_key_id" => id = value,
                "aws_secret_access_key" => secret = value,
                "aws_session_token" => token = value,
                _ => {}
            }
        }
    }
    Some(AwsCredential {
        key_id: id?,
        secret_key: secret?,
        token,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_gives_its_profiles_credentials_as_they_are_now() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let write = |text: &str| std::fs::write(file.path(), text).expect("written");
        let read = |profile: &str| {
            let profile = profile.to_owned();
            let path = file.path().to_owned();
            CredentialsFile { path, profile }.read()
        };
        write(
            "# keys\n[other]\naws_access_key_id=o\naws_secret_access_key = p=q\n\n[default]\n\
             aws_access_key_id = first\naws_secret_access_key = s\n; a note\n",
        );
        let first = read("default").expect("it is there");
        assert_eq!((&*first.key_id, &*first.secret_key), ("first", "s"));
        assert_eq!(first.token, None);
        let other = read("other").expect("it is there");
        assert_eq!((&*other.key_id, &*other.secret_key), ("o", "p=q"));
        write(
            "[default]\naws_access_key_id=second\naws_secret_access_key=t\naws_session_token=u\n",
        );
        let second = read("default").expect("it is there");
        assert_eq!(second.key_id, "second");
        assert_eq!(second.token.as_deref(), Some("u"));
        for text in [
            "",
            "[default]\naws_access_key_id=x\n",
            "aws_access_key_id=x\naws_secret_access_key=y\n",
        ] {
            write(text);
            let error = read("default").expect_err("nothing of use");
            assert!(
                error.contains("[default]") && !error.contains('x'),
                "{error}"
            );
        }
        drop(file);
    }
}
