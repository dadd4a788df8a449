//! Checks the documents' statements about commands against the command line itself.

use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ErrorKind};
use clap::{Command, CommandFactory as _, Parser as _};

use crate::arguments::{Arguments, Command as Called};
use crate::commands;

/// Returns the root folder of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the documents below a folder, or a single document, with their paths.
fn documents_at(place: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    files(&root().join(place), "md", &mut found);
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).expect("a document");
        let name = path
            .strip_prefix(root())
            .expect("a path below the repository");
        (name.display().to_string(), text)
    };
    found.into_iter().map(read).collect()
}

/// Returns the documents for users of the program.
fn manuals() -> Vec<(String, String)> {
    let places = [
        "README.md",
        "docs/start.md",
        "docs/concepts",
        "docs/operate",
        "docs/machines",
        "docs/reference",
    ];
    places.into_iter().flat_map(documents_at).collect()
}

/// Returns the commands in a document's shell blocks, each as its words.
fn commands_to_run(document: &str) -> Vec<Vec<String>> {
    let blocks = document.split("```sh\n").skip(1);
    let shell: String = blocks
        .filter_map(|rest| Some(rest.split_once("```")?.0))
        .collect();
    let lines = shell.replace("\\\n", " ");
    lines.lines().flat_map(commands_in).collect()
}

/// Returns the commands named in running text.
fn commands_named(document: &str) -> Vec<Vec<String>> {
    let mut fenced = document.split("```").step_by(2);
    let text: String = fenced.by_ref().collect();
    let named = text.split('`').skip(1).step_by(2).map(|code| {
        // A line break in code counts as a space.
        code.replace('\n', " ")
    });
    named.flat_map(|code| commands_in(&code)).collect()
}

/// Returns the calls of `godwit` in a line of shell. The line must be simple enough to be split at command separators.
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
                // The file of the redirection.
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

/// Returns all executable commands below a command.
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
    let mut found = 0;
    for (name, document) in manuals() {
        for words in commands_to_run(&document) {
            found += 1;
            if let Err(error) = Arguments::try_parse_from(&words) {
                panic!("{name}: {}: {error}", words.join(" "));
            }
        }
    }
    assert!(found > 40, "{found} commands were found");
}

#[test]
fn every_node_in_the_documents_can_start() {
    let mut found = 0;
    for (name, document) in manuals() {
        for words in commands_to_run(&document) {
            let Ok(Arguments {
                mut connection,
                command: Called::Node(node),
                ..
            }) = Arguments::try_parse_from(&words)
            else {
                continue;
            };
            found += 1;
            // A line before the command may export the authority.
            connection.ca = connection.ca.or_else(|| connection.cert.clone());
            let config = commands::node::config(*node, connection);
            let started = config.map_err(|error| error.to_string());
            let started = started.and_then(|it| it.check().map_err(|error| error.to_string()));
            assert_eq!(started, Ok(()), "{name}: {}", words.join(" "));
        }
    }
    assert!(found > 5, "{found} nodes were found");
}

/// Returns the error of a command that cannot exist. A command named in text may be incomplete.
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
    for (name, document) in manuals() {
        for words in commands_named(&document) {
            let error = does_not_exist(&words);
            assert!(error.is_none(), "{name}: {}: {error:?}", words.join(" "));
        }
    }
}

/// Returns the commands in a source file's strings, which errors and hints tell users to run. Comments are skipped.
fn commands_hinted(source: &str) -> Vec<Vec<String>> {
    let code = source
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    // A string continues in the next line.
    let code: String = code.map(|line| format!("{line}\n")).collect();
    let code = code.split("\\\n").map(str::trim_start).collect::<String>();
    let named = code
        .split("godwit ")
        .skip(1)
        .zip(code.match_indices("godwit "));
    let named = named.filter(|(_, (at, _))| code[..*at].ends_with(['\'', ' ']));
    let hinted = named.filter_map(|(rest, _)| {
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || " -_/{}.".contains(c)))?;
        let words = rest[..end].replace(['{', '}'], "x");
        let is_command = words.starts_with(|c: char| c.is_ascii_lowercase());
        is_command.then(|| format!("godwit {words}"))
    });
    hinted.flat_map(|text| commands_in(&text)).collect()
}

/// Collects the files with this ending below a folder, or a single file.
fn files(place: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    if place.is_file() {
        return found.push(place.to_owned());
    }
    for entry in std::fs::read_dir(place).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() || path.extension().is_some_and(|it| it == ending) {
            files(&path, ending, found);
        }
    }
}

#[test]
fn commands_are_found_in_hints_however_they_are_written() {
    let source = "// godwit disk rename\n.hint(\"repeat it: godwit disk \\\n   rm NAME, or 'godwit vm list {x}'\")\n";
    assert_eq!(
        commands_hinted(source),
        [
            vec!["godwit", "disk", "rm", "NAME"],
            vec!["godwit", "vm", "list", "xxx"]
        ]
    );
}

#[test]
fn every_command_that_a_hint_names_exists() {
    let mut found = Vec::new();
    for name in ["cli", "node", "block", "qemu", "api"] {
        let place = root().join(format!("crates/godwit-{name}/src"));
        files(&place, "rs", &mut found);
    }
    found.retain(|path| !path.ends_with(file!().rsplit('/').next().unwrap_or_default()));
    let mut hints = 0;
    for path in found {
        let source = std::fs::read_to_string(&path).expect("a source file");
        for words in commands_hinted(&source) {
            hints += 1;
            let (error, named) = (does_not_exist(&words), words.join(" "));
            // The sentence may go on after a command.
            let error = error.filter(|error| {
                error.kind() == ErrorKind::InvalidSubcommand
                    || error
                        .get(ContextKind::InvalidArg)
                        .is_some_and(|it| it.to_string().starts_with('-'))
            });
            assert!(error.is_none(), "{}: {named}: {error:?}", path.display());
        }
    }
    assert!(hints > 20, "{hints} hints were found");
}

#[test]
fn every_command_and_option_is_documented() {
    let told: String = manuals()
        .into_iter()
        .map(|(_, document)| document)
        .collect();
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

/// Returns an option's default from the table of a document.
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
    let moving = documents_at("docs/operate/moving.md");
    let [(_, moving)] = &moving[..] else {
        panic!("one document tells of moving")
    };
    let mut compared = 0;
    for option in migrate
        .get_arguments()
        .filter(|option| !option.is_positional())
    {
        let long = option.get_long().expect("a long name");
        let Some(told) = documented_default(moving, &format!("--{long}")) else {
            continue;
        };
        compared += 1;
        let default = option.get_default_values().first();
        let default = default.map(|value| value.to_string_lossy().into_owned());
        let takes_value = option.get_action().takes_values();
        match default {
            Some(default) if takes_value => assert_eq!(told, default, "--{long}"),
            _ if !takes_value => assert_eq!(told, "off", "--{long}"),
            // The node chooses the default, and the option's help must agree with the document.
            _ => assert!(!told.is_empty(), "--{long}"),
        }
    }
    assert!(compared > 10, "{compared} defaults were compared");
}

/// Returns the targets of a document's links.
fn links(document: &str) -> impl Iterator<Item = &str> {
    let text = document.split("](").skip(1);
    text.filter_map(|rest| Some(rest.split_once(')')?.0))
}

/// Returns GitHub's link anchor for a heading.
fn anchor(heading: &str) -> String {
    let kept = heading
        .trim_start_matches('#')
        .trim()
        .to_lowercase()
        .replace(' ', "-");
    kept.chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_'))
        .collect()
}

#[test]
fn every_link_leads_somewhere() {
    let places = [
        "docs",
        "bench/README.md",
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
    ];
    let mut followed = 0;
    for (name, document) in places.into_iter().flat_map(documents_at) {
        for link in links(&document).filter(|link| !link.contains(':')) {
            followed += 1;
            let (file, wanted) = link.split_once('#').unwrap_or((link, ""));
            let from = root().join(&name);
            let target = match file {
                "" => from,
                file => from.parent().expect("a folder").join(file),
            };
            assert!(target.exists(), "{name}: {link}");
            if !wanted.is_empty() {
                let text = std::fs::read_to_string(&target).expect("a document");
                let mut headings = text.lines().filter(|line| line.starts_with('#'));
                assert!(headings.any(|it| anchor(it) == wanted), "{name}: {link}");
            }
        }
    }
    assert!(followed > 60, "{followed} links were followed");
}
