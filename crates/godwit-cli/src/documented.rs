//! What the documents say about commands, held against the command line itself.

use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{Command, CommandFactory as _, Parser as _};

use crate::arguments::Arguments;

const DOCUMENTS: [(&str, &str); 3] = [
    ("README.md", include_str!("../../../README.md")),
    (
        "docs/operations.md",
        include_str!("../../../docs/operations.md"),
    ),
    (
        "docs/virtual-machines.md",
        include_str!("../../../docs/virtual-machines.md"),
    ),
];

/// The commands in the blocks of a document that a shell is to run, each as its words.
fn commands_to_run(document: &str) -> Vec<Vec<String>> {
    let blocks = document.split("```sh\n").skip(1);
    let shell: String = blocks
        .filter_map(|rest| Some(rest.split_once("```")?.0))
        .collect();
    let lines = shell.replace("\\\n", " ");
    lines.lines().flat_map(commands_in).collect()
}

/// The commands that are named in running text.
fn commands_named(document: &str) -> Vec<Vec<String>> {
    let mut fenced = document.split("```").step_by(2);
    let text: String = fenced.by_ref().collect();
    let named = text.split('`').skip(1).step_by(2).map(|code| {
        // A line's end is a space there.
        code.replace('\n', " ")
    });
    named.flat_map(|code| commands_in(&code)).collect()
}

/// The calls of `godwit` in a line of shell, which is simple enough to be split at what separates
/// commands.
fn commands_in(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![vec![String::new()]];
    let (mut quote, mut begun) = (None, true);
    let mut rest = line.chars().peekable();
    while let Some(c) = rest.next() {
        let command = commands.last_mut().expect("never empty");
        let word = command.last_mut().expect("never empty");
        match (c, quote) {
            ('#', None) if begun => break,
            ('$', None | Some('"')) if rest.peek() == Some(&'(') => {
                rest.next();
                quote = None;
                commands.push(vec![String::new()]);
            }
            ('\'' | '"', None) => quote = Some(c),
            (c, Some(open)) if c == open => quote = None,
            (';' | '|' | '&' | '(' | ')', None) => commands.push(vec![String::new()]),
            (' ', None) => command.push(String::new()),
            (c, _) => word.push(c),
        }
        begun = c == ' ';
    }
    let complete = |words: Vec<String>| {
        let mut words = words.into_iter().filter(|word| !word.is_empty());
        let mut called = Vec::new();
        while let Some(word) = words.next() {
            if word.ends_with('>') {
                // The file that it goes to.
                words.next();
            } else if !word.contains('>') {
                called.push(word);
            }
        }
        called
            .first()
            .is_some_and(|first| first == "godwit")
            .then_some(called)
    };
    commands.into_iter().filter_map(complete).collect()
}

/// All commands below this one that do something themselves.
fn leaves(command: &Command) -> Vec<&Command> {
    match command.has_subcommands() {
        true => command.get_subcommands().flat_map(leaves).collect(),
        false => vec![command],
    }
}

#[test]
fn commands_are_found_in_what_a_shell_runs() {
    let found =
        commands_in("a=1 && godwit x --to b 2>log & fio --uri=\"$(godwit y 'p<2 ms')\" # godwit z");
    assert_eq!(
        found,
        [
            vec!["godwit", "x", "--to", "b"],
            vec!["godwit", "y", "p<2 ms"]
        ]
    );
}

#[test]
fn every_command_in_the_documents_can_be_given() {
    for (name, document) in DOCUMENTS {
        let commands = commands_to_run(document);
        assert!(commands.len() > 5, "{name}: {commands:?}");
        for words in commands {
            if let Err(error) = Arguments::try_parse_from(&words) {
                panic!("{name}: {}: {error}", words.join(" "));
            }
        }
    }
}

/// Why such a command cannot be meant. What is named need not be complete.
fn does_not_exist(words: &[String]) -> Option<clap::Error> {
    let error = Arguments::try_parse_from(words).err()?;
    let wrong = matches!(
        error.kind(),
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand
    );
    wrong.then_some(error)
}

#[test]
fn every_command_that_the_documents_name_exists() {
    for (name, document) in DOCUMENTS {
        for words in commands_named(document) {
            let error = does_not_exist(&words);
            assert!(error.is_none(), "{name}: {}: {error:?}", words.join(" "));
        }
    }
}

/// The commands between quotes in the texts of a source file: what errors and hints tell people to run.
fn commands_hinted(source: &str) -> Vec<Vec<String>> {
    let quoted = source.split('\'').skip(1);
    let hinted = quoted.filter(|text| text.starts_with("godwit "));
    hinted.flat_map(commands_in).collect()
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn every_command_that_a_hint_names_exists() {
    let mut found = Vec::new();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for name in ["godwit-cli", "godwit-node", "godwit-block"] {
        sources(&crates.join(name).join("src"), &mut found);
    }
    let mut hints = 0;
    for path in found {
        let source = std::fs::read_to_string(&path).expect("a source file");
        for words in commands_hinted(&source) {
            hints += 1;
            let (error, named) = (does_not_exist(&words), words.join(" "));
            assert!(error.is_none(), "{}: {named}: {error:?}", path.display());
        }
    }
    assert!(hints > 20, "{hints} hints were found");
}

#[test]
fn every_command_and_option_is_documented() {
    let told = DOCUMENTS.map(|(_, document)| document).concat();
    let tells = |word: &str| {
        let ends = |c: char| !c.is_ascii_alphanumeric() && c != '-';
        told.match_indices(word)
            .any(|(at, _)| told[at + word.len()..].starts_with(ends))
    };
    let program = Arguments::command();
    let mut untold = Vec::new();
    for command in leaves(&program) {
        let name = command.get_name();
        let options = command
            .get_arguments()
            .filter(|option| !option.is_hide_set());
        let options = options.filter_map(|option| Some(format!("--{}", option.get_long()?)));
        let words = options.chain([name.to_owned()]);
        untold.extend(
            words
                .filter(|word| !tells(word))
                .map(|word| format!("{name}: {word}")),
        );
    }
    assert_eq!(untold, [""; 0]);
}

/// The default that the table of a document gives for an option.
fn documented_default<'a>(document: &'a str, option: &str) -> Option<&'a str> {
    let row = document
        .lines()
        .find(|line| line.starts_with(&format!("| `{option}")))?;
    row.trim_end_matches('|').rsplit('|').next().map(str::trim)
}

#[test]
fn defaults_are_those_that_the_documents_give() {
    let program = Arguments::command();
    let migrate = program.find_subcommand("migrate").expect("a command");
    let [_, (_, operations), _] = DOCUMENTS;
    for option in migrate
        .get_arguments()
        .filter(|option| !option.is_positional())
    {
        let long = option.get_long().expect("a long name");
        let Some(told) = documented_default(operations, &format!("--{long}")) else {
            continue;
        };
        let default = option.get_default_values().first();
        let default = default.map(|value| value.to_string_lossy().into_owned());
        let takes_value = option.get_action().takes_values();
        match default {
            Some(default) if takes_value => assert_eq!(told, default, "--{long}"),
            _ if !takes_value => assert_eq!(told, "off", "--{long}"),
            // The node chooses: its help says how as the document does.
            _ => assert!(!told.is_empty(), "--{long}"),
        }
    }
}
