//! What a registered entry is: a description, not an instance.

use std::any::Any;

use schemars::{JsonSchema, Schema};
use serde::de::DeserializeOwned;

use super::settings::{self, BuildError, guarded};
use super::{BuildContext, Place};
use crate::slots;

/// A place in a run that stages are chosen for by name. Implemented by the markers in [`crate::slots`].
pub trait Slot: 'static {
    /// The section of the run file.
    const NAME: &'static str;
    /// One line for `zf stages`.
    const HELP: &'static str;
    /// The key of the section that names the stage.
    const KEY: &'static str = "kind";
    /// The stage taken when the section names none.
    const DEFAULT: Option<&'static str>;
    /// The slot whose stages go around stages of this one, if there is one; it builds [`super::Wrap`]. The section lists
    /// them under `wrap`, from the inside out.
    const WRAP: Option<&'static str> = None;
    /// Whether the section is there, with its default stage, where a run file does not mention it.
    const IMPLIED: bool = true;
    /// The slot whose stages ask for one of these, if only some of them do. Where a later layer names another stage there, what a
    /// preset said here goes with the stage for which it said it.
    const SERVES: Option<&'static str> = None;
    /// What a stage of this slot builds.
    type Stage: 'static;
}

/// Settings of a stage: what a section of the run file is read into, and how the stage is made of it.
///
/// The type should carry `#[serde(deny_unknown_fields)]`; its doc comments become the help of its keys. The key that
/// names the stage ([`Slot::KEY`]) is taken out before. The same type is the library's way to make the stage.
pub trait Build<S: Slot>: DeserializeOwned + JsonSchema + 'static {
    /// Makes the stage.
    ///
    /// # Errors
    /// Settings that do not fit together (see [`super::setting`] to point at one), files that cannot be read.
    fn build(self, cx: &BuildContext) -> anyhow::Result<S::Stage>;
}

/// The constants of a [`Slot`] as data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotInfo {
    /// [`Slot::NAME`].
    pub name: &'static str,
    /// [`Slot::HELP`].
    pub help: &'static str,
    /// [`Slot::KEY`].
    pub key: &'static str,
    /// [`Slot::DEFAULT`].
    pub default: Option<&'static str>,
    /// [`Slot::WRAP`].
    pub wrap: Option<&'static str>,
    /// [`Slot::IMPLIED`].
    pub implied: bool,
    /// [`Slot::SERVES`].
    pub serves: Option<&'static str>,
}

impl SlotInfo {
    /// Those of `S`.
    pub const fn of<S: Slot>() -> Self {
        Self {
            name: S::NAME,
            help: S::HELP,
            key: S::KEY,
            default: S::DEFAULT,
            wrap: S::WRAP,
            implied: S::IMPLIED,
            serves: S::SERVES,
        }
    }

    /// Whether run files have a section of its name: all but presets and decorators (`transport.wrap`).
    pub fn is_section(&self) -> bool {
        self.name != slots::Preset::NAME && !self.name.contains('.')
    }
}

type ErasedBuild = fn(toml::Table, &BuildContext) -> Result<Box<dyn Any>, BuildError>;

/// A registered entry. Made by [`crate::register!`] and [`crate::register_preset!`].
#[derive(Debug, Clone, Copy)]
pub struct Description {
    /// The slot it belongs to.
    pub slot: SlotInfo,
    /// The name that run files choose it by.
    pub name: &'static str,
    /// One line that says what it does.
    pub help: &'static str,
    /// The crate that registered it.
    pub krate: &'static str,
    /// Where it was registered.
    pub place: Place,
    /// Lines of a run file that show it; for a preset, the preset itself.
    pub example: &'static str,
    schema: fn() -> Schema,
    check: fn(toml::Table) -> Result<(), BuildError>,
    build: ErasedBuild,
}

impl Description {
    /// The description of the stage `name` of slot `S` with the settings `C`. Used by [`crate::register!`].
    pub const fn new<S: Slot, C: Build<S>>(
        name: &'static str,
        help: &'static str,
        example: &'static str,
        krate: &'static str,
        place: Place,
    ) -> Self {
        Self {
            slot: SlotInfo::of::<S>(),
            name,
            help,
            krate,
            place,
            example,
            schema: schema_of::<C>,
            check: check_of::<C>,
            build: build_of::<S, C>,
        }
    }

    /// The description of a preset. Used by [`crate::register_preset!`].
    pub const fn preset(
        name: &'static str,
        help: &'static str,
        text: &'static str,
        krate: &'static str,
        place: Place,
    ) -> Self {
        Self {
            slot: SlotInfo::of::<slots::Preset>(),
            name,
            help,
            krate,
            place,
            example: text,
            schema: no_settings,
            check: |_| Ok(()),
            build: no_build,
        }
    }

    /// The JSON schema of its settings.
    pub fn schema(&self) -> Schema {
        (self.schema)()
    }

    /// Reads the settings, without the key that names the stage, and builds nothing.
    pub(crate) fn check(&self, table: toml::Table) -> Result<(), BuildError> {
        settings::refuse_unknown(&table, &self.schema())?;
        guarded(|| (self.check)(table))
    }

    /// Builds the stage from its settings, without the key that names it. A panic becomes an error.
    pub(super) fn build(&self, table: toml::Table, cx: &BuildContext) -> Result<Box<dyn Any>, BuildError> {
        settings::refuse_unknown(&table, &self.schema())?;
        guarded(|| (self.build)(table, cx))
    }
}

inventory::collect!(Description);

fn schema_of<C: JsonSchema>() -> Schema {
    schemars::schema_for!(C)
}

fn check_of<C: DeserializeOwned>(table: toml::Table) -> Result<(), BuildError> {
    settings::read::<C>(table).map(drop)
}

fn build_of<S: Slot, C: Build<S>>(table: toml::Table, cx: &BuildContext) -> Result<Box<dyn Any>, BuildError> {
    let settings: C = settings::read(table)?;
    match settings.build(cx) {
        Ok(stage) => Ok(Box::new(stage)),
        Err(error) => Err(BuildError::from_build(error)),
    }
}

fn no_settings() -> Schema {
    schemars::json_schema!({ "type": "object", "properties": {}, "additionalProperties": false })
}

fn no_build(_: toml::Table, _: &BuildContext) -> Result<Box<dyn Any>, BuildError> {
    Err(BuildError::Build(anyhow::anyhow!("a preset is part of a run file and cannot be built")))
}

/// Registers a stage: `register!(SlotType, "name", SettingsType, "one-line help", "example lines of a run file")`.
///
/// `SettingsType` implements [`Build`](crate::registry::Build) for the slot. The entry exists in every binary that
/// links the crate; a crate that is listed in `Cargo.toml` but never named in code is not linked (`use my_stages as _;`
/// names it).
///
/// ```
/// use std::sync::Arc;
///
/// use zf_core::registry::{Build, BuildContext, Registry};
/// use zf_core::slots;
/// use zf_core::stage::Schedule;
///
/// /// Halves the rate every so many steps.
/// #[derive(serde::Deserialize, schemars::JsonSchema)]
/// #[serde(deny_unknown_fields)]
/// struct Halving {
///     /// Steps between two halvings.
///     every: u64,
/// }
///
/// impl Schedule for Halving {
///     fn factor(&self, step: u64, _total: u64) -> f64 {
///         0.5_f64.powi((step / self.every) as i32)
///     }
/// }
///
/// impl Build<slots::Schedule> for Halving {
///     fn build(self, _cx: &BuildContext) -> anyhow::Result<Arc<dyn Schedule>> {
///         anyhow::ensure!(self.every > 0, "`every` must be at least 1");
///         Ok(Arc::new(self))
///     }
/// }
///
/// zf_core::register!(slots::Schedule, "halving", Halving, "halves the rate every so many steps", "every = 100");
///
/// # fn main() -> zf_core::Result<()> {
/// let table = toml::toml! { kind = "halving" every = 10 };
/// let schedule = Registry::global()?.build::<slots::Schedule>(&table, &BuildContext::default())?;
/// assert_eq!(schedule.factor(25, 100), 0.25);
/// # Ok(())
/// # }
/// ```
#[macro_export]
macro_rules! register {
    ($slot:ty, $name:expr, $settings:ty, $help:expr, $example:expr $(,)?) => {
        $crate::inventory::submit! {
            $crate::registry::Description::new::<$slot, $settings>(
                $name,
                $help,
                $example,
                env!("CARGO_PKG_NAME"),
                $crate::registry::Place { file: file!(), line: line!() },
            )
        }
    };
}

/// Registers a preset, a named fragment of a run file: `register_preset!("name", "one-line help", "toml text")`.
#[macro_export]
macro_rules! register_preset {
    ($name:expr, $help:expr, $text:expr $(,)?) => {
        $crate::inventory::submit! {
            $crate::registry::Description::preset(
                $name,
                $help,
                $text,
                env!("CARGO_PKG_NAME"),
                $crate::registry::Place { file: file!(), line: line!() },
            )
        }
    };
}
