//! Reading a stage's own settings, with errors that say which key is wrong.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use schemars::Schema;
use serde::de::DeserializeOwned;
use serde_path_to_error::Segment;

use super::nearest;

/// A step from a table to a value in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// An entry of a table.
    Key(String),
    /// An element of an array.
    Index(usize),
}

/// The dotted form of a path: `scope.p`, `groups[0].lr`.
pub fn dotted(path: &[Step]) -> String {
    let mut text = String::new();
    for step in path {
        match step {
            Step::Key(key) => {
                if !text.is_empty() {
                    text.push('.');
                }
                text.push_str(key);
            }
            Step::Index(index) => text.push_str(&format!("[{index}]")),
        }
    }
    text
}

/// What is wrong with a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// A key that nothing reads. The last step of the path.
    UnknownKey {
        /// Those that are read, sorted.
        expected: Vec<String>,
    },
    /// A required key that is not there. The path leads to the table that should hold it.
    MissingKey {
        /// The key.
        key: String,
    },
    /// A name that is not one of a list.
    UnknownValue {
        /// What was found.
        found: String,
        /// The list.
        expected: Vec<String>,
    },
    /// Anything else that is wrong with a value.
    Value {
        /// What was expected and what was found.
        message: String,
    },
}

/// A setting that is wrong, and where in its table it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// From the section's table.
    pub path: Vec<Step>,
    /// What is wrong.
    pub fault: Fault,
}

impl Problem {
    /// The last key of the path.
    pub fn key(&self) -> String {
        self.path
            .iter()
            .rev()
            .find_map(|step| match step {
                Step::Key(key) => Some(key.clone()),
                Step::Index(_) => None,
            })
            .unwrap_or_default()
    }

    /// What is wrong, in one line, in the section that `place` names (`[partition] zero`).
    pub fn message(&self, place: &str) -> String {
        let dotted = dotted(&self.path);
        match &self.fault {
            Fault::UnknownKey { .. } => format!("unknown key `{dotted}` in {place}"),
            Fault::MissingKey { key } if dotted.is_empty() => {
                format!("missing key `{key}` in {place}")
            }
            Fault::MissingKey { key } => format!("missing key `{dotted}.{key}` in {place}"),
            Fault::UnknownValue { found, .. } if dotted.is_empty() => {
                format!("unknown value `{found}` in {place}")
            }
            Fault::UnknownValue { found, .. } => {
                format!("unknown value `{found}` for `{dotted}` in {place}")
            }
            Fault::Value { message } if dotted.is_empty() => format!("{place}: {message}"),
            Fault::Value { message } => format!("`{dotted}` in {place}: {message}"),
        }
    }

    /// What is wrong, in one line, where nothing knows the section.
    fn alone(&self) -> String {
        match &self.fault {
            Fault::Value { message } => format!("`{}`: {message}", dotted(&self.path)),
            _ => self.message("the settings"),
        }
    }

    /// What to do about it, for the line with the caret; may be empty.
    pub fn advice(&self) -> String {
        let (found, expected) = match &self.fault {
            Fault::UnknownKey { expected } => (self.key(), expected),
            Fault::UnknownValue { found, expected } => (found.clone(), expected),
            Fault::MissingKey { .. } | Fault::Value { .. } => return String::new(),
        };
        if expected.is_empty() {
            return "nothing can be set here".to_owned();
        }
        let list = format!("expected one of: {}", expected.join(", "));
        match nearest(&found, expected.iter().map(String::as_str)) {
            Some(near) => format!("did you mean `{near}`? {list}"),
            None => list,
        }
    }
}

/// Why a stage was not built.
#[derive(Debug)]
pub(crate) enum BuildError {
    /// Its settings are wrong.
    Settings(Problem),
    /// `build` returned an error.
    Build(anyhow::Error),
    /// `build` panicked with this text.
    Panic(String),
}

impl BuildError {
    /// An error of `build`, which may point at a setting.
    pub(super) fn from_build(error: anyhow::Error) -> Self {
        match error.downcast::<BadSetting>() {
            Ok(bad) => Self::Settings(bad.0),
            Err(error) => Self::Build(error),
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{}", .0.alone())]
struct BadSetting(Problem);

/// An error for [`super::Build::build`] that points at one of the stage's own settings, by its dotted key: the message
/// then comes with file, line and caret.
///
/// ```
/// let error = zf_core::registry::setting("scope.p", "must be \"world\" or a divisor of the ranks, found 3");
/// assert_eq!(error.to_string(), "`scope.p`: must be \"world\" or a divisor of the ranks, found 3");
/// ```
pub fn setting(key: &str, message: impl std::fmt::Display) -> anyhow::Error {
    within(key, Problem { path: Vec::new(), fault: Fault::Value { message: message.to_string() } })
}

/// The error of [`setting`] for a problem in what stands under `key`.
pub(super) fn within(key: &str, mut problem: Problem) -> anyhow::Error {
    problem.path.splice(..0, key.split('.').map(|key| Step::Key(key.to_owned())));
    anyhow::Error::new(BadSetting(problem))
}

/// Reads a table into a settings type.
pub(crate) fn read<T: DeserializeOwned>(table: toml::Table) -> Result<T, BuildError> {
    serde_path_to_error::deserialize(toml::Value::Table(table)).map_err(|error| BuildError::Settings(problem(&error)))
}

/// Refuses keys that the schema does not list, for settings types that forgot `deny_unknown_fields`: a setting without
/// effect is never silent.
pub(super) fn refuse_unknown(table: &toml::Table, schema: &Schema) -> Result<(), BuildError> {
    let Some(properties) = schema.get("properties").and_then(|p| p.as_object()) else {
        return Ok(());
    };
    let open = ["additionalProperties", "unevaluatedProperties", "anyOf", "oneOf", "allOf", "$ref"];
    if open.iter().any(|keyword| schema.get(*keyword).is_some()) {
        return Ok(());
    }
    match table.keys().find(|key| !properties.contains_key(*key)) {
        None => Ok(()),
        Some(key) => Err(BuildError::Settings(Problem {
            path: vec![Step::Key(key.clone())],
            fault: Fault::UnknownKey { expected: sorted(properties.keys().cloned()) },
        })),
    }
}

/// Code of a plugin must not take the program down: a panic becomes an error.
pub(super) fn guarded<T>(f: impl FnOnce() -> Result<T, BuildError>) -> Result<T, BuildError> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| Err(BuildError::Panic(panic_text(panic.as_ref()))))
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

fn problem(error: &serde_path_to_error::Error<toml::de::Error>) -> Problem {
    let mut path: Vec<Step> = error
        .path()
        .iter()
        .filter_map(|segment| match segment {
            Segment::Seq { index } => Some(Step::Index(*index)),
            Segment::Map { key } => Some(Step::Key(key.clone())),
            Segment::Enum { .. } | Segment::Unknown => None,
        })
        .collect();
    let message = error.inner().message().trim().to_owned();
    let names = quoted(&message);
    let fault = if message.starts_with("unknown field ") {
        let key = names.first().cloned().unwrap_or_default();
        // The path ends with the unknown key when serde saw it as an entry of a table, not inside a flattened one.
        if path.last() != Some(&Step::Key(key.clone())) {
            path.push(Step::Key(key));
        }
        Fault::UnknownKey { expected: sorted(names.into_iter().skip(1)) }
    } else if message.starts_with("missing field ") {
        Fault::MissingKey { key: names.into_iter().next().unwrap_or_default() }
    } else if message.starts_with("unknown variant ") {
        let mut names = names.into_iter();
        Fault::UnknownValue { found: names.next().unwrap_or_default(), expected: names.collect() }
    } else {
        Fault::Value { message: plain(&message) }
    };
    Problem { path, fault }
}

/// "invalid type: string "x", expected u64" in the words of this project's messages.
fn plain(message: &str) -> String {
    let rest = message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "));
    match rest.and_then(|rest| rest.rsplit_once(", expected ")) {
        Some((found, expected)) => {
            let expected = match expected {
                "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, 0 or more",
                "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
                "f32" | "f64" => "a number",
                "a boolean" => "true or false",
                other => other,
            };
            format!("expected {expected}, found {found}")
        }
        None => message.to_owned(),
    }
}

/// The texts between backticks.
fn quoted(message: &str) -> Vec<String> {
    message.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn sorted(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}
