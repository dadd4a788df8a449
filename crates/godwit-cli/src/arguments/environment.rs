//! Options from environment variables. An empty variable counts as unset, and error messages name the variable.

use std::ffi::{OsStr, OsString};

use clap::builder::{BoolishValueParser, Resettable};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Command, CommandFactory as _, FromArgMatches as _};

use super::{Arguments, moving};

impl Arguments {
    /// Parses a command line and the environment.
    ///
    /// # Errors
    /// If the arguments are invalid.
    pub(crate) fn read(words: Vec<OsString>) -> Result<Self, clap::Error> {
        let mut command = adapted(Arguments::command());
        let parsed = command.try_get_matches_from_mut(&words);
        let parsed = parsed.and_then(|mut found| {
            moving::check(&mut command, &found)?;
            Self::from_arg_matches_mut(&mut found)
        });
        parsed.map_err(|error| {
            // The unadapted command still knows empty variables, and arguments can be displayed only once the command
            // is built.
            let mut all = Self::command();
            all.build();
            let unknown = error.kind() == ErrorKind::InvalidSubcommand;
            match moving::former(&words).filter(|_| unknown) {
                Some(now) => all.error(ErrorKind::InvalidSubcommand, now),
                None => naming_variables(error, &all, &words),
            }
        })
    }
}

/// Adapts a command: resets empty variables, and accepts all usual words for yes and no.
fn adapted(command: Command) -> Command {
    let command = command.mut_args(|argument| {
        let Some(variable) = argument.get_env() else {
            return argument;
        };
        if std::env::var_os(variable).is_some_and(|value| value.is_empty()) {
            return argument.env(Resettable::<clap::builder::OsStr>::Reset);
        }
        match argument.get_action() {
            ArgAction::SetTrue => argument.value_parser(BoolishValueParser::new()),
            _ => argument,
        }
    });
    command.mut_subcommands(adapted)
}

/// Adds to an error the variable that holds the invalid value, or that could supply the missing value.
fn naming_variables(mut error: clap::Error, command: &Command, words: &[OsString]) -> clap::Error {
    let named = |shown: &str| {
        let argument = find(command, shown)?;
        let variable = argument.get_env()?.to_str()?;
        let is_set = std::env::var_os(variable).is_some_and(|value| !value.is_empty());
        let from_words = words.iter().any(|word| gives(word, argument));
        (!from_words).then(|| match is_set {
            true => format!("{variable} ({shown})"),
            false => format!("{shown} (or {variable})"),
        })
    };
    let changed = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(shown)) => named(shown).map(ContextValue::String),
        Some(ContextValue::Strings(all)) => {
            let all = all
                .iter()
                .map(|shown| named(shown).unwrap_or_else(|| shown.clone()));
            Some(ContextValue::Strings(all.collect()))
        }
        _ => None,
    };
    if let Some(changed) = changed {
        error.insert(ContextKind::InvalidArg, changed);
    }
    error
}

/// Finds an argument by its displayed form, in a command and its subcommands.
fn find<'a>(command: &'a Command, shown: &str) -> Option<&'a Arg> {
    let mut own = command.get_arguments();
    let own = own.find(|argument| argument.to_string() == shown);
    own.or_else(|| {
        command
            .get_subcommands()
            .find_map(|command| find(command, shown))
    })
}

/// Returns true if a word of a command line gives this argument.
fn gives(word: &OsStr, argument: &Arg) -> bool {
    let word = word.to_string_lossy();
    let name = word.strip_prefix("--").unwrap_or_default();
    let name = name.split('=').next();
    name.is_some() && name == argument.get_long()
}
