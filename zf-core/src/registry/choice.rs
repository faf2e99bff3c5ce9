//! A setting of one stage that chooses a stage of another slot.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::settings::{self, BuildError};
use super::{BuildContext, Fault, Problem, Registry, Slot, Step, describe};

/// A stage of slot `S`, chosen within the settings of another stage: its name, or a table with its name
/// ([`Slot::KEY`]) and its settings.
///
/// ```
/// use zf_core::registry::Choice;
/// use zf_core::slots;
///
/// #[derive(serde::Deserialize)]
/// struct Settings {
///     score: Choice<slots::Score>,
/// }
///
/// # fn main() -> Result<(), toml::de::Error> {
/// let short: Settings = toml::from_str("score = 'l1'")?;
/// let long: Settings = toml::from_str("score = { kind = 'adam', eps = 1e-8 }")?;
/// assert_eq!(short.score, Choice::named("l1"));
/// assert_ne!(short.score, long.score);
/// # Ok(())
/// # }
/// ```
pub struct Choice<S: Slot> {
    named: Named,
    slot: PhantomData<fn() -> S>,
}

#[derive(Debug, Clone, PartialEq)]
enum Named {
    Name(String),
    Table(toml::Table),
}

impl<S: Slot> Choice<S> {
    /// The stage of this name, with the defaults of its settings.
    pub fn named(name: impl Into<String>) -> Self {
        Self { named: Named::Name(name.into()), slot: PhantomData }
    }

    /// The stage that the table names by [`Slot::KEY`], with the settings in it.
    pub fn table(table: toml::Table) -> Self {
        Self { named: Named::Table(table), slot: PhantomData }
    }

    /// Builds the stage, for [`Build::build`](super::Build::build) of the stage that has this setting under `key`.
    ///
    /// # Errors
    /// An unknown name or settings that are wrong, as errors that point at `key` or below it; what the stage's own
    /// `build` returns, a panic in it.
    pub fn build(&self, key: &str, cx: &BuildContext) -> anyhow::Result<S::Stage> {
        let registry = Registry::global()?;
        let wrong = |path: &[Step], fault| settings::within(key, Problem { path: path.to_vec(), fault });
        let own_key = [Step::Key(S::KEY.to_owned())];
        let (name, place, table): (&str, &[Step], _) = match &self.named {
            Named::Name(name) => (name, &[], toml::Table::new()),
            Named::Table(table) => match table.get(S::KEY) {
                Some(toml::Value::String(name)) => (name, &own_key, table.clone()),
                Some(other) => {
                    let message = format!("expected the name of a stage, found {} `{other}`", other.type_str());
                    return Err(wrong(&own_key, Fault::Value { message }));
                }
                None => match S::DEFAULT {
                    Some(name) => (name, &[], table.clone()),
                    None => return Err(wrong(&[], Fault::MissingKey { key: S::KEY.to_owned() })),
                },
            },
        };
        let Some(entry) = registry.find(S::NAME, name) else {
            let expected = registry.names(S::NAME).into_iter().map(str::to_owned).collect();
            return Err(wrong(place, Fault::UnknownValue { found: name.to_owned(), expected }));
        };
        registry.build_entry::<S>(entry, &table, cx).map_err(|error| match error {
            BuildError::Settings(problem) => wrong(&problem.path, problem.fault),
            other => describe(entry, other, "").into(),
        })
    }
}

// Derives would ask the same of the marker `S`, which is never a value.

impl<S: Slot> Clone for Choice<S> {
    fn clone(&self) -> Self {
        Self { named: self.named.clone(), slot: PhantomData }
    }
}

impl<S: Slot> PartialEq for Choice<S> {
    fn eq(&self, other: &Self) -> bool {
        self.named == other.named
    }
}

impl<S: Slot> fmt::Debug for Choice<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.named.fmt(f)
    }
}

impl<S: Slot> Serialize for Choice<S> {
    fn serialize<T: Serializer>(&self, serializer: T) -> Result<T::Ok, T::Error> {
        match &self.named {
            Named::Name(name) => name.serialize(serializer),
            Named::Table(table) => table.serialize(serializer),
        }
    }
}

impl<'de, S: Slot> Deserialize<'de> for Choice<S> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match toml::Value::deserialize(deserializer)? {
            toml::Value::String(name) => Ok(Self::named(name)),
            toml::Value::Table(table) => Ok(Self::table(table)),
            other => Err(D::Error::custom(format!(
                "expected the name of a stage or a table with the key `{}`, found {} `{other}`",
                S::KEY,
                other.type_str()
            ))),
        }
    }
}

impl<S: Slot> JsonSchema for Choice<S> {
    fn schema_name() -> Cow<'static, str> {
        format!("stage of {}", S::NAME).into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        schemars::json_schema!({
            "description": format!("a name of `zf stages {}`, or a table with `{}` and the stage's settings", S::NAME, S::KEY),
            "anyOf": [
                { "type": "string" },
                { "type": "object", "properties": { S::KEY: { "type": "string" } }, "required": [S::KEY] }
            ]
        })
    }
}
