//! Decorators: stages around the stage of a slot, listed in its section under `wrap`, from the inside out.

use super::settings::{self, BuildError};
use super::{BuildContext, Description, Fault, Problem, Registry, Slot, SlotInfo, Step};
use crate::Error;

/// What a decorator of slot `S` builds: a function that puts it around a stage.
pub type Wrap<S> = Box<dyn FnOnce(<S as Slot>::Stage) -> anyhow::Result<<S as Slot>::Stage>>;

/// The key of a section that lists decorators.
pub(crate) const LIST: &str = "wrap";

/// The key of a decorator that names it.
const KEY: &str = "kind";

/// One element of the list.
pub(crate) struct Decorator<'a> {
    at: usize,
    entry: &'a Description,
    settings: toml::Table,
}

impl Registry {
    /// Takes the list of decorators out of `table`, the settings of a stage of `slot`. Empty where there is no list; where
    /// the slot has no decorators the key stays, for the stage to refuse.
    pub(crate) fn take_decorators(
        &self,
        slot: &SlotInfo,
        table: &mut toml::Table,
    ) -> Result<Vec<Decorator<'_>>, BuildError> {
        let Some(decorators) = slot.wrap else { return Ok(Vec::new()) };
        let items = match table.remove(LIST) {
            None => return Ok(Vec::new()),
            Some(toml::Value::Array(items)) => items,
            Some(other) => {
                let message = format!(
                    "expected a list such as [{{ {KEY} = \"...\" }}], from the inside out, found {}",
                    other.type_str()
                );
                return Err(wrong(vec![Step::Key(LIST.into())], Fault::Value { message }));
            }
        };
        let decorator = |(at, item)| {
            let place = vec![Step::Key(LIST.into()), Step::Index(at)];
            let toml::Value::Table(mut settings) = item else {
                let message = format!("expected a table with the key `{KEY}`");
                return Err(wrong(place, Fault::Value { message }));
            };
            let expected = || self.names(decorators).into_iter().map(str::to_owned).collect();
            let name = match settings.remove(KEY) {
                Some(toml::Value::String(name)) => name,
                _ => return Err(wrong(place, Fault::MissingKey { key: KEY.into() })),
            };
            match self.find(decorators, &name) {
                Some(entry) => Ok(Decorator { at, entry, settings }),
                None => {
                    let place = [place, vec![Step::Key(KEY.into())]].concat();
                    Err(wrong(place, Fault::UnknownValue { found: name, expected: expected() }))
                }
            }
        };
        items.into_iter().enumerate().map(decorator).collect()
    }
}

impl Decorator<'_> {
    /// Reads the settings and builds nothing.
    pub(crate) fn check(self) -> Result<(), BuildError> {
        let (at, entry) = (self.at, self.entry);
        entry.check(self.settings).map_err(|error| placed(error, at, entry))
    }

    /// Puts the decorator around `stage`.
    pub(super) fn around<S: Slot>(self, stage: S::Stage, cx: &BuildContext) -> Result<S::Stage, BuildError> {
        let (at, entry) = (self.at, self.entry);
        let around = || {
            let wrap = entry.build(self.settings, cx)?.downcast::<Wrap<S>>().map_err(|_| {
                let message = format!("stages of slot `{}` do not go around stages of `{}`", entry.slot.name, S::NAME);
                BuildError::Build(anyhow::anyhow!(message))
            })?;
            settings::guarded(|| wrap(stage).map_err(BuildError::from_build))
        };
        around().map_err(|error| placed(error, at, entry))
    }
}

fn wrong(path: Vec<Step>, fault: Fault) -> BuildError {
    BuildError::Settings(Problem { path, fault })
}

/// The error of element `at` as one of the section.
fn placed(error: BuildError, at: usize, entry: &Description) -> BuildError {
    let place = format!("{LIST}[{at}] {}", entry.name);
    match error {
        BuildError::Settings(mut problem) => {
            problem.path.splice(..0, [Step::Key(LIST.into()), Step::Index(at)]);
            BuildError::Settings(problem)
        }
        BuildError::Panic(text) => BuildError::Panic(format!("{place}: {text}")),
        BuildError::Build(error) => BuildError::Build(match error.downcast::<Error>() {
            Ok(Error::Config(text)) => Error::Config(format!("{place}: {text}")).into(),
            Ok(error) => error.into(),
            Err(error) => error.context(place),
        }),
    }
}
