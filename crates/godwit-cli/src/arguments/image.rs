//! The arguments of `godwit image`, and the location of the image repository.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use godwit_image::{ImageName, Location};

use crate::failure::Failure;
use godwit_api::text::parse_duration;

/// Where images are kept. Credentials are those of the environment: AWS_ACCESS_KEY_ID and so on, or
/// AWS_SHARED_CREDENTIALS_FILE.
#[derive(Clone, Debug, Args)]
pub(crate) struct RepositoryArguments {
    /// Where images are kept: s3://BUCKET[/FOLDER], with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY from the
    /// environment, or a directory
    #[arg(
        long,
        global = true,
        env = "GODWIT_REPOSITORY",
        value_name = "s3://BUCKET|DIR"
    )]
    pub repository: Option<Location>,
    /// Where that S3 store answers, if it is not Amazon's
    #[arg(
        long,
        global = true,
        env = "GODWIT_REPOSITORY_ENDPOINT",
        value_name = "URL"
    )]
    pub repository_endpoint: Option<String>,
    /// The certificate of an authority to trust for that S3 store beside the system's: PEM
    #[arg(long, global = true, env = "GODWIT_REPOSITORY_CA", value_name = "FILE")]
    pub repository_ca: Option<PathBuf>,
}

impl RepositoryArguments {
    /// Returns the repository's location, if there is one.
    pub(crate) fn location(self) -> Result<Option<Location>, Failure> {
        let Some(mut location) = self.repository else {
            let given = [
                (self.repository_endpoint.is_some(), "--repository-endpoint"),
                (self.repository_ca.is_some(), "--repository-ca"),
            ];
            return match given.into_iter().find(|(given, _)| *given) {
                Some((_, option)) => Err(Failure::usage(format!(
                    "{option} needs --repository s3://BUCKET"
                ))),
                None => Ok(None),
            };
        };
        if let Some(endpoint) = self.repository_endpoint {
            location = location
                .at(endpoint)
                .map_err(|error| Failure::usage(format!("--repository-endpoint: {error}")))?;
        }
        if let Some(file) = self.repository_ca {
            let file = std::path::absolute(&file).unwrap_or(file);
            location = location
                .trusting(file)
                .map_err(|error| Failure::usage(format!("--repository-ca: {error}")))?;
        }
        Ok(Some(location))
    }
}

#[derive(Debug, Args)]
pub(crate) struct ImageArguments {
    #[command(flatten)]
    pub repository: RepositoryArguments,
    #[command(subcommand)]
    pub command: ImageCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// Bring an image file into the repository; what is there already is not sent again
    Push {
        /// The image's name, like debian:12
        name: ImageName,
        /// The file or block device; nothing may write to it meanwhile
        file: PathBuf,
        /// What it is; raw when left out, unless it begins like another format. qcow2 is converted by qemu-img, in TMPDIR
        #[arg(long, value_enum)]
        format: Option<ImageFile>,
        /// Give the name to this image if another has it
        #[arg(long)]
        replace: bool,
        /// Read chunks that are there already, and send those again that are damaged
        #[arg(long)]
        check: bool,
    },
    /// Write an image into a new file
    Pull {
        /// The image
        name: ImageName,
        /// The file; it must not exist
        file: PathBuf,
        /// What it becomes
        #[arg(long, value_enum, default_value_t)]
        format: ImageFile,
    },
    /// List images
    List,
    /// Show an image, and which disks still fetch from it
    Show {
        /// The image
        name: ImageName,
    },
    /// Remove an image; what no other has goes with the next gc
    Rm {
        /// The image
        name: ImageName,
        /// Also when disks still fetch from it: what they lack is lost with the next gc
        #[arg(long)]
        force: bool,
    },
    /// Forget all disks of a node that is gone for good, so that the images can be removed from which they fetched
    ForgetNode {
        /// The node's name; what its disks lack may be lost if it is not gone
        node: String,
    },
    /// Remove from the repository what no image has any more
    Gc {
        /// Only tell how much that is
        #[arg(long)]
        dry_run: bool,
        /// How long other hosts may see the repository as it was; a minute for a directory when left out, and 0s where only
        /// this host uses it. Four times as long is waited
        #[arg(long, value_name = "TIME", value_parser = parse_duration)]
        cache_time: Option<u64>,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ImageFile {
    /// Its bytes are the disk's content
    #[default]
    Raw,
    /// QEMU's format
    Qcow2,
}
