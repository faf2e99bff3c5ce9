//! The registry: which stages exist, found by slot and name.
//!
//! Stages are registered where they are defined, with [`crate::register!`], in any crate of the program. An entry is a
//! [`Description`]: `zf stages`, the help of `zf explain`, the errors for unknown names and keys all come from it.

mod choice;
mod context;
mod description;
pub mod schema;
mod settings;
mod wrap;

use std::any::Any;
use std::fmt;
use std::sync::OnceLock;

pub use choice::Choice;
pub use context::{BuildContext, DataBundle, ModelBundle};
pub use description::{Build, Description, Slot, SlotInfo};
pub(crate) use settings::{BuildError, read};
pub use settings::{Fault, Problem, Step, dotted, setting};
pub use wrap::Wrap;
pub(crate) use wrap::{Decorator, LIST as WRAP_LIST};

use crate::{Error, Result, slots};

/// A place in the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The file, as the compiler names it.
    pub file: &'static str,
    /// The line, from 1.
    pub line: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// All entries, sorted by slot and name, each name once in its slot.
#[derive(Debug, Clone)]
pub struct Registry {
    entries: Vec<Description>,
}

impl Registry {
    /// The entries of all crates that are linked into this program.
    ///
    /// # Errors
    /// Two entries with one name in one slot; the message names both places.
    pub fn collect() -> Result<Self> {
        Self::of(inventory::iter::<Description>.into_iter().copied())
    }

    /// A registry of these entries alone.
    ///
    /// # Errors
    /// As [`Registry::collect`].
    pub fn of(entries: impl IntoIterator<Item = Description>) -> Result<Self> {
        let mut entries: Vec<Description> = entries.into_iter().collect();
        entries.sort_by_key(|e| (e.slot.name, e.name, e.place.file, e.place.line));
        for pair in entries.windows(2) {
            if (pair[0].slot.name, pair[0].name) == (pair[1].slot.name, pair[1].name) {
                return Err(Error::Config(format!(
                    "{} stage `{}` is registered twice, at {} (crate {}) and at {} (crate {}); rename one of them",
                    pair[0].slot.name, pair[0].name, pair[0].place, pair[0].krate, pair[1].place, pair[1].krate
                )));
            }
        }
        Ok(Self { entries })
    }

    /// The registry of this program, collected once.
    ///
    /// # Errors
    /// As [`Registry::collect`].
    pub fn global() -> Result<&'static Self> {
        static GLOBAL: OnceLock<Result<Registry, String>> = OnceLock::new();
        GLOBAL
            .get_or_init(|| Self::collect().map_err(|error| error.to_string()))
            .as_ref()
            .map_err(|text| Error::Config(text.clone()))
    }

    /// All entries by slot and name.
    pub fn entries(&self) -> &[Description] {
        &self.entries
    }

    /// The slots: those of [`slots::ALL`], then further ones that entries name.
    pub fn slots(&self) -> Vec<SlotInfo> {
        let mut all = slots::ALL.to_vec();
        for entry in &self.entries {
            if all.iter().all(|slot| slot.name != entry.slot.name) {
                all.push(entry.slot);
            }
        }
        all
    }

    /// The slot called `name`.
    ///
    /// # Errors
    /// An unknown slot; the message lists all.
    pub fn slot(&self, name: &str) -> Result<SlotInfo> {
        let all = self.slots();
        all.iter().find(|slot| slot.name == name).copied().ok_or_else(|| {
            let mut names: Vec<&str> = all.iter().map(|slot| slot.name).collect();
            names.sort_unstable();
            let near = nearest(name, names.iter().copied());
            Error::Config(format!(
                "unknown slot `{name}`{} slots are: {}",
                near.map_or_else(|| ";".to_owned(), |near| format!(", did you mean `{near}`?")),
                names.join(", ")
            ))
        })
    }

    /// The names of a slot's entries, sorted. Empty for an unknown slot.
    pub fn names(&self, slot: &str) -> Vec<&'static str> {
        let of_slot = self.entries.iter().filter(|entry| entry.slot.name == slot);
        of_slot.map(|entry| entry.name).collect()
    }

    /// The entry `name` of `slot`.
    ///
    /// # Errors
    /// An unknown slot or name; the message lists the names, the nearest first, and asks whether the crate is linked.
    pub fn get(&self, slot: &str, name: &str) -> Result<&Description> {
        self.slot(slot)?;
        self.find(slot, name)
            .ok_or_else(|| Error::Config(format!("unknown {slot} stage `{name}`: {}", self.unknown_name(slot, name))))
    }

    /// Builds the stage that `table`, a section of a run file, names by [`Slot::KEY`] (or [`Slot::DEFAULT`]), with those
    /// of its key `wrap` around it, where the slot has such ([`Slot::WRAP`]).
    ///
    /// # Errors
    /// An unknown name, settings that are wrong (naming the key), what the stage's own `build` returns, a panic in it.
    pub fn build<S: Slot>(&self, table: &toml::Table, cx: &BuildContext) -> Result<S::Stage> {
        let name = stage_name(&SlotInfo::of::<S>(), table)?;
        let entry = self.get(S::NAME, name)?;
        self.build_entry::<S>(entry, table, cx).map_err(|error| describe(entry, error, ""))
    }

    pub(crate) fn find(&self, slot: &str, name: &str) -> Option<&Description> {
        self.entries.iter().find(|entry| entry.slot.name == slot && entry.name == name)
    }

    /// What to say after an unknown name.
    pub(crate) fn unknown_name(&self, slot: &str, name: &str) -> String {
        let names = self.names(slot);
        let near = nearest(name, names.iter().copied());
        let list = if names.is_empty() {
            "none is registered".to_owned()
        } else {
            format!("registered are: {}", names.join(", "))
        };
        format!(
            "{}{list}; is the crate that defines it linked?",
            near.map_or_else(String::new, |near| format!("did you mean `{near}`? "))
        )
    }

    pub(crate) fn build_entry<S: Slot>(
        &self,
        entry: &Description,
        table: &toml::Table,
        cx: &BuildContext,
    ) -> Result<S::Stage, BuildError> {
        let mut table = table.clone();
        table.remove(S::KEY);
        let decorators = self.take_decorators(&SlotInfo::of::<S>(), &mut table)?;
        let stage: Box<dyn Any> = entry.build(table, cx)?;
        let stage = stage.downcast::<S::Stage>().map_err(|_| {
            BuildError::Build(anyhow::anyhow!("slot `{}` is declared twice with different stage types", S::NAME))
        })?;
        decorators.into_iter().try_fold(*stage, |stage, decorator| decorator.around::<S>(stage, cx))
    }
}

/// The name of the stage that a section chooses.
pub(crate) fn stage_name<'a>(slot: &SlotInfo, table: &'a toml::Table) -> Result<&'a str> {
    match table.get(slot.key) {
        Some(toml::Value::String(name)) => Ok(name),
        Some(other) => Err(Error::Config(format!(
            "`{}` in [{}]: expected the name of a stage, found {} `{other}`",
            slot.key,
            slot.name,
            other.type_str()
        ))),
        None => slot.default.ok_or_else(|| Error::Config(format!("missing key `{}` in [{}]", slot.key, slot.name))),
    }
}

/// The error for a stage that was not built, `place` (ending in `: `, or empty) before it.
pub(crate) fn describe(entry: &Description, error: BuildError, place: &str) -> Error {
    let stage = format!("[{}] {}", entry.slot.name, entry.name);
    match error {
        BuildError::Settings(problem) => {
            let advice = problem.advice();
            let join = if advice.is_empty() { "" } else { "; " };
            Error::Config(format!("{place}{}{join}{advice}", problem.message(&stage)))
        }
        BuildError::Panic(text) => Error::Stage {
            slot: entry.slot.name,
            stage: entry.name.to_owned(),
            message: format!("panicked while it was built: {text}"),
        },
        BuildError::Build(error) => match error.downcast::<Error>() {
            Ok(Error::Config(text)) => Error::Config(format!("{place}{stage}: {text}")),
            Ok(Error::Input(text)) => Error::Input(format!("{place}{stage}: {text}")),
            Ok(error @ Error::Io { .. }) => Error::Input(format!("{place}{stage}: {error}")),
            Ok(Error::Interrupted) => Error::Interrupted,
            Ok(error) => {
                Error::Stage { slot: entry.slot.name, stage: entry.name.to_owned(), message: error.to_string() }
            }
            Err(error) => Error::Config(format!("{place}{stage}: {error:#}")),
        },
    }
}

/// The candidate that `found` was probably meant to be.
pub fn nearest<'a>(found: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let allowed = (found.chars().count() / 3).max(1);
    candidates
        .into_iter()
        .map(|name| (strsim::damerau_levenshtein(found, name), name))
        .filter(|(distance, name)| *distance <= allowed && *distance < name.chars().count())
        .min()
        .map(|(_, name)| name)
}
