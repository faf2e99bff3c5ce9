//! The run file: layers of TOML, typed sections, and errors that show file, line and caret.
//!
//! Later layers win: defaults, the preset, `extends` files, the file, `-o key=value`. Tables are joined, everything else
//! is replaced. When a layer names another stage for a section than the layers below, their settings for the old stage
//! are dropped, with what a preset said in sections that serve that stage ([`Slot::SERVES`]: `[select]` of the preset `zenflow` where
//! `[offload]` becomes another); so are `run.steps`, `run.epochs` and `run.tokens` when a later layer gives another of the three.
//!
//! Relative paths in stages' settings (keys called `path`, or marked with `"format": "path"` in their schema) are made
//! absolute when they are read: those of a file from the folder of the file that holds them, those of an override from the
//! current folder.

mod explain;
mod load;
mod rules;
mod sections;
mod source;
mod sweep;
mod tree;

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

pub use explain::Row;
use load::{Layers, Loader};
use rules::{Broken, NOT_YET, Sections};
pub use sections::{
    Accumulate, CheckpointSettings, DeviceKind, DeviceSection, HostSection, LogSection, ReduceSection, ReduceWhen,
    RunSection, Unused, ValidateSettings,
};
use source::{Mark, Source};
pub use sweep::{Case, Expect, Sweep, folder_name};
use tree::{Node, Tree};

use crate::registry::{
    self, BuildContext, BuildError, Decorator, Description, Fault, Problem, Registry, Slot, SlotInfo, Step, describe,
    nearest,
};
use crate::{Error, Result};

/// The sections that belong to no stage.
const FIXED: &[&str] = &["run", "device", "host", "reduce", "log"];

/// A run file with everything that is laid under and over it, checked.
#[derive(Debug, Clone)]
pub struct Run {
    /// `[run]`.
    pub run: RunSection,
    /// `[device]`.
    pub device: DeviceSection,
    /// `[host]`.
    pub host: HostSection,
    /// `[reduce]`.
    pub reduce: ReduceSection,
    /// `[log]`.
    pub log: LogSection,
    /// The preset that it builds on.
    pub preset: Option<String>,
    preset_source: String,
    label: String,
    base: PathBuf,
    sources: Vec<Source>,
    root: Tree,
    /// The stage of each section, where it is registered.
    stages: Vec<(SlotInfo, Description)>,
}

/// Reads a run file with the overrides of the command line (`key.path=value`), or the overrides alone.
///
/// # Errors
/// Files that cannot be read, text that is no TOML, unknown sections, stages and keys, wrong values, rules across keys
/// that are broken: [`Error::Config`] with place and remedy.
pub fn load(file: Option<&Path>, overrides: &[String], registry: &Registry) -> Result<Run> {
    let mut loader = Loader::new(registry);
    if let Some(file) = file {
        loader.file(file)?;
    }
    for text in overrides {
        loader.overriding(text)?;
    }
    let base = file.and_then(Path::parent).unwrap_or(Path::new(""));
    let label = file.map_or_else(|| "run".into(), |file| file.display().to_string());
    Run::new(loader.finish()?, label, base.to_owned(), registry)
}

impl Run {
    /// Reads a run file's text, for tests and for programs. Messages call it `name`; relative paths stay relative.
    ///
    /// # Errors
    /// As [`load`].
    pub fn from_toml_str(text: &str, name: &str) -> Result<Self> {
        Self::from_toml_str_with(text, name, &[], Registry::global()?)
    }

    /// The same with overrides and a registry.
    ///
    /// # Errors
    /// As [`load`].
    pub fn from_toml_str_with(text: &str, name: &str, overrides: &[String], registry: &Registry) -> Result<Self> {
        let mut loader = Loader::new(registry);
        loader.text(text, name)?;
        for text in overrides {
            loader.overriding(text)?;
        }
        Self::new(loader.finish()?, name.to_owned(), PathBuf::new(), registry)
    }

    /// The file's name without folder and extension.
    pub fn name(&self) -> &str {
        let stem = Path::new(&self.label).file_stem();
        stem.and_then(|stem| stem.to_str()).unwrap_or("run")
    }

    /// The folder of the file.
    pub fn base(&self) -> &Path {
        &self.base
    }

    /// A context for [`Run::build`] with what the run file knows: base folder and seed.
    pub fn context(&self) -> BuildContext {
        BuildContext { base: self.base.clone(), seed: self.run.seed, ..BuildContext::default() }
    }

    /// The name of the stage that fills a slot.
    pub fn stage<S: Slot>(&self) -> Option<&str> {
        let section = self.section(S::NAME);
        let named = section.and_then(|tree| tree.get(S::KEY));
        named.and_then(Node::text).or(S::DEFAULT)
    }

    /// Builds the stage of slot `S`.
    ///
    /// # Errors
    /// A stage that is not registered; what its `build` returns, with the place in the file.
    pub fn build<S: Slot>(&self, registry: &Registry, cx: &BuildContext) -> Result<S::Stage> {
        let table = self.section(S::NAME).map(Tree::plain).unwrap_or_default();
        let name = registry::stage_name(&SlotInfo::of::<S>(), &table)?;
        let entry = registry.get(S::NAME, name)?;
        registry.build_entry::<S>(entry, &table, cx).map_err(|error| self.stage_error(entry, error))
    }

    /// The micro-batches that each of `ranks` ranks runs in a step: `global_batch / (micro_batch x ranks)`.
    ///
    /// # Errors
    /// When that is not a whole number; the message says what fits.
    pub fn accumulation(&self, ranks: usize) -> Result<usize> {
        rules::batch(&self.run, ranks).map_err(|broken| self.broken(&broken))
    }

    /// An error at one of the run's keys (`run.dtype`), with place and caret: for rules that only a program can check.
    pub fn error_at(&self, key: &str, message: &str) -> Error {
        let path: Vec<Step> = key.split('.').map(|k| Step::Key(k.into())).collect();
        self.fail(&path, false, &format!("`{key}`: {message}"), "")
    }

    /// Whether some layer gives the key (`run.loss_scale`), as opposed to its default.
    pub fn given(&self, key: &str) -> bool {
        let path: Vec<Step> = key.split('.').map(|k| Step::Key(k.into())).collect();
        self.root.find(&path).is_some()
    }

    fn new(layers: Layers, label: String, base: PathBuf, registry: &Registry) -> Result<Self> {
        let Layers { sources, root, preset, preset_mark } = layers;
        let preset_source = preset_mark.map_or_else(String::new, |mark: Mark| sources[mark.source].origin(&mark.span));
        let mut run = Self {
            run: RunSection::default(),
            device: DeviceSection::default(),
            host: HostSection::default(),
            reduce: ReduceSection::default(),
            log: LogSection::default(),
            preset,
            preset_source,
            label,
            base,
            sources,
            root,
            stages: Vec::new(),
        };
        run.known_sections(registry)?;
        run.run = run.read("run")?;
        run.device = run.read("device")?;
        run.host = run.read("host")?;
        run.reduce = run.read("reduce")?;
        run.log = run.read("log")?;
        run.stages = run.known_stages(registry)?;
        let sections = Sections {
            run: run.run.clone(),
            device: run.device.clone(),
            reduce: run.reduce.clone(),
            log: run.log.clone(),
        };
        rules::check(&sections, &|key| run.given(key), run.ranks()).map_err(|broken| run.broken(&broken))?;
        Ok(run)
    }

    /// Ranks as far as the file says: `transport.ranks`.
    fn ranks(&self) -> Option<usize> {
        let ranks = self.section("transport")?.get("ranks")?.plain();
        // The transport itself refuses 0.
        usize::try_from(ranks.as_integer()?).ok().filter(|ranks| *ranks > 0)
    }

    fn section(&self, name: &str) -> Option<&Tree> {
        self.root.get(name).and_then(Node::table)
    }

    fn known_sections(&self, registry: &Registry) -> Result<()> {
        let slots = registry.slots();
        let names: Vec<&str> =
            slots.iter().filter(|slot| slot.is_section()).map(|slot| slot.name).chain(FIXED.iter().copied()).collect();
        if self.given("sweep") {
            let message = "[sweep] lists several runs, which `zf ablate` starts";
            return Err(self.fail(&[Step::Key("sweep".into())], true, message, "take it out for a single run"));
        }
        for (key, what) in NOT_YET {
            if self.given(key) && !names.contains(key) {
                let path: Vec<Step> = key.split('.').map(|k| Step::Key(k.into())).collect();
                let shown = if key.contains('.') { format!("`{key}`") } else { format!("[{key}]") };
                let message = format!("{shown} is not in this version, which has no {what}");
                return Err(self.fail(&path, true, &message, ""));
            }
        }
        for (key, node) in &self.root.0 {
            let path = [Step::Key(key.clone())];
            if !names.contains(&key.as_str()) {
                let mut known = names.clone();
                known.sort_unstable();
                let advice = match nearest(key, known.iter().copied()) {
                    Some(near) => format!("did you mean `{near}`? "),
                    None => String::new(),
                };
                let list = known.join(", ");
                let message = match node.table() {
                    Some(_) => format!("unknown section [{key}]"),
                    None => format!("unknown key `{key}` outside of a section"),
                };
                let advice = format!("{advice}sections are: {list}");
                return Err(self.fail(&path, true, &message, &advice));
            }
            if node.table().is_none() {
                let found = node.plain();
                let message = format!("expected a section [{key}], found {}", found.type_str());
                return Err(self.fail(&path, false, &message, ""));
            }
        }
        Ok(())
    }

    fn known_stages(&self, registry: &Registry) -> Result<Vec<(SlotInfo, Description)>> {
        let mut stages = Vec::new();
        for slot in registry.slots() {
            if !slot.is_section() {
                continue;
            }
            let table = self.section(slot.name).map(Tree::plain);
            let given = table.clone().unwrap_or_default();
            let name = match (given.get(slot.key), slot.default) {
                (Some(toml::Value::String(name)), _) => name.as_str(),
                (Some(other), _) => {
                    let message = format!(
                        "`{}` in [{}]: expected the name of a stage, found {}",
                        slot.key,
                        slot.name,
                        other.type_str()
                    );
                    return Err(self.fail(&keys(slot.name, slot.key), false, &message, ""));
                }
                (None, Some(name)) if table.is_some() || slot.implied => name,
                (None, _) => continue,
            };
            let Some(entry) = registry.find(slot.name, name) else {
                // A program without any stage for a section can still read files that do not mention it.
                if table.is_none() {
                    continue;
                }
                let message = format!("unknown {} stage `{name}`", slot.name);
                let advice = registry.unknown_name(slot.name, name);
                return Err(self.fail(&keys(slot.name, slot.key), false, &message, &advice));
            };
            let mut settings = given;
            settings.remove(slot.key);
            let decorators = registry.take_decorators(&slot, &mut settings);
            let checked = decorators.and_then(|all| {
                entry.check(settings)?;
                all.into_iter().try_for_each(Decorator::check)
            });
            checked.map_err(|error| self.stage_error(entry, error))?;
            stages.push((slot, *entry));
        }
        Ok(stages)
    }

    fn read<T: DeserializeOwned>(&self, section: &str) -> Result<T> {
        let table = self.section(section).map(Tree::plain).unwrap_or_default();
        registry::read(table).map_err(|error| match error {
            BuildError::Settings(problem) => self.problem(section, &problem, &format!("[{section}]")),
            BuildError::Build(error) => Error::Config(format!("[{section}]: {error:#}")),
            BuildError::Panic(text) => Error::Engine(format!("[{section}]: {text}")),
        })
    }

    fn stage_error(&self, entry: &Description, error: BuildError) -> Error {
        let section = entry.slot.name;
        match error {
            BuildError::Settings(problem) => self.problem(section, &problem, &format!("[{section}] {}", entry.name)),
            other => {
                let node = self.root.get(section);
                let place = match node {
                    Some(node) => format!("{}: ", self.sources[node.key.source].origin(&node.key.span)),
                    None => format!("{}: ", self.label),
                };
                describe(entry, other, &place)
            }
        }
    }

    fn problem(&self, section: &str, problem: &Problem, place: &str) -> Error {
        let mut path = vec![Step::Key(section.to_owned())];
        path.extend(problem.path.iter().cloned());
        let at_key = matches!(problem.fault, Fault::UnknownKey { .. } | Fault::MissingKey { .. });
        self.fail(&path, at_key, &problem.message(place), &problem.advice())
    }

    fn broken(&self, broken: &Broken) -> Error {
        let path: Vec<Step> = broken.key.split('.').map(|k| Step::Key(k.into())).collect();
        let message = match broken.key.split_once('.') {
            Some((section, key)) => format!("`{key}` in [{section}]: {}", broken.message),
            None => format!("[{}] {}", broken.key, broken.message),
        };
        self.fail(&path, path.len() == 1, &message, &broken.advice)
    }

    /// The error at `path`, or at the nearest table above it that some layer gives.
    fn fail(&self, path: &[Step], at_key: bool, message: &str, advice: &str) -> Error {
        let found = (1..=path.len()).rev().find_map(|length| {
            let node = self.root.find(&path[..length])?;
            let whole = length == path.len() && !at_key;
            Some(if whole { &node.value } else { &node.key })
        });
        Error::Config(match found {
            Some(mark) => self.sources[mark.source].render(&mark.span, message, advice),
            None if advice.is_empty() => format!("{}: {message}", self.label),
            None => format!("{}: {message}; {advice}", self.label),
        })
    }

    /// Where the value at `path` comes from.
    fn origin(&self, path: &[Step]) -> String {
        match self.root.find(path) {
            Some(node) => self.sources[node.value.source].origin(&node.value.span),
            None => "default".to_owned(),
        }
    }
}

fn keys(section: &str, key: &str) -> [Step; 2] {
    [Step::Key(section.to_owned()), Step::Key(key.to_owned())]
}
