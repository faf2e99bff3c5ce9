//! A sweep: a run file with a section `[sweep]` that lists cases, each the run file with some keys set otherwise.
//!
//! ```toml
//! [sweep]
//! seeds = [1, 2]                       # each case once for each
//! baseline = "plain"                   # what the others are compared with; by default the first case
//! expect = "equal"                     # or "different", or { tolerance = 1e-3 }: what is expected of every other case
//! "partition.bucket" = ["1KB", "1MB"]  # a list: one case for each value, all lists combined
//!
//! [[sweep.case]]                       # or cases with names; with lists beside them, each is combined with each
//! name = "plain"
//! partition.stage = 0
//!
//! [[sweep.case]]
//! name = "split"
//! partition.stage = 3
//! expect = { tolerance = 1e-3 }        # instead of the sweep's own
//! ```
//!
//! A case is a layer above the file and the command line's overrides. Places of its errors are those of the sweep.

mod label;
mod read;

use std::path::{Path, PathBuf};

use super::Run;
use super::load::Loader;
use super::source::Mark;
use super::tree::{Body, Node, Tree};
use crate::registry::{Registry, Step, nearest};
use crate::{Error, Result};
use read::{Axis, MAX_RUNS, Named, Section, insert};

pub use label::folder_name;

/// What is expected of a case's losses beside those of its baseline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Expect {
    /// The same bits, and the same bits of the final state.
    Equal,
    /// Losses of all steps that differ by at most this part of the larger one.
    Tolerance(f64),
    /// Losses or final state that are not the same bits.
    Different,
}

/// One combination of settings.
#[derive(Debug, Clone)]
pub struct Case {
    /// Its name, unlike that of every other case also as [`folder_name`]: `split,partition.bucket=1KB`.
    pub name: String,
    /// The case (an index of [`Sweep::cases`]) that it is compared with; its own for a baseline.
    pub baseline: usize,
    /// What is expected, never for a baseline.
    pub expect: Option<Expect>,
    /// What it sets, by dotted key.
    pub settings: Vec<(String, toml::Value)>,
    layer: Tree,
}

/// A run file with the cases of its `[sweep]`.
#[derive(Debug, Clone)]
pub struct Sweep<'a> {
    /// In order: named cases in that of the file; of lists, the last one changes fastest.
    pub cases: Vec<Case>,
    seeds: Vec<(u64, Mark)>,
    loader: Loader<'a>,
    file: PathBuf,
}

impl<'a> Sweep<'a> {
    /// Reads a sweep with the overrides of the command line (`key.path=value`), which hold for all its cases.
    ///
    /// # Errors
    /// [`Error::Config`] with place and remedy: files that cannot be read, text that is no TOML, a `[sweep]` that is
    /// missing or makes no sense, an override of a key that the sweep sets. The runs themselves are checked by
    /// [`Sweep::run`].
    pub fn load(file: &Path, overrides: &[String], registry: &'a Registry) -> Result<Self> {
        let mut loader = Loader::new(registry).of_sweep();
        loader.file(file)?;
        let Some(node) = loader.take_sweep() else {
            return Err(Error::Config(format!(
                "{}: no [sweep] section, which lists what to compare; `zf train` starts a run file without one",
                file.display()
            )));
        };
        let section = read::section(&node, &loader)?;
        let cases = expand(&section, &loader)?;
        for text in overrides {
            loader.overriding(text)?;
            let key = text.split('=').next().unwrap_or_default();
            let path: Vec<Step> = key.split('.').map(|part| Step::Key(part.trim().to_owned())).collect();
            let seed = key.trim() == "run.seed" && !section.seeds.is_empty();
            if seed || cases.iter().any(|case| case.layer.find(&path).is_some()) {
                return Err(Error::Config(format!("-o {text}: has no effect, the sweep sets `{}` itself", key.trim())));
            }
        }
        Ok(Self { cases, seeds: section.seeds, loader, file: file.to_owned() })
    }

    /// The seeds that each case runs with: those of the sweep, or `None` alone for the run file's own.
    pub fn seeds(&self) -> Vec<Option<u64>> {
        if self.seeds.is_empty() { vec![None] } else { self.seeds.iter().map(|(seed, _)| Some(*seed)).collect() }
    }

    /// The run of a case, checked. `seed` is one of the sweep's seeds.
    ///
    /// # Errors
    /// As [`load`](super::load), with the name of the case.
    pub fn run(&self, case: &Case, seed: Option<u64>) -> Result<Run> {
        let mut layer = case.layer.clone();
        if let Some((seed, mark)) = seed.and_then(|seed| self.seeds.iter().find(|(known, _)| *known == seed)) {
            let value = toml::Value::Integer(seed.cast_signed());
            let path = ["run".to_owned(), "seed".to_owned()];
            // What stands in the way can only be a `run` that is no section, which is refused below.
            let _ = insert(&mut layer, &path, Node::leaf(value, mark.clone()));
        }
        let mut loader = self.loader.clone();
        loader.layer(layer);
        let base = self.file.parent().unwrap_or(Path::new("")).to_owned();
        let run = loader
            .finish()
            .and_then(|layers| Run::new(layers, self.file.display().to_string(), base, self.loader.registry()));
        run.map_err(|error| case.blame(error))
    }
}

impl Case {
    /// An error of the case's run with the case's name.
    pub fn blame(&self, error: Error) -> Error {
        match error {
            Error::Config(text) => Error::Config(format!("{text}\n   in case `{}`", self.name)),
            other => other,
        }
    }
}

/// All cases of a section.
fn expand(section: &Section, loader: &Loader<'_>) -> Result<Vec<Case>> {
    let Section { axes, named, seeds, expect, mark, .. } = section;
    if axes.is_empty() && named.is_empty() && seeds.is_empty() {
        let advice = "give lists of values such as `\"partition.stage\" = [0, 1]`, or `[[sweep.case]]`";
        return Err(loader.fail(mark, "[sweep] names no case", advice));
    }
    let combinations = axes.iter().try_fold(1_usize, |count, axis| count.checked_mul(axis.values.len()));
    let count = combinations.and_then(|count| count.checked_mul(named.len().max(1))?.checked_mul(seeds.len().max(1)));
    let Some(combinations) = combinations.filter(|_| count.is_some_and(|count| count <= MAX_RUNS)) else {
        let count = count.map_or_else(|| "too many".to_owned(), |count| count.to_string());
        let message = format!("[sweep] asks for {count} runs, expected at most {MAX_RUNS}");
        return Err(loader.fail(mark, &message, ""));
    };
    let mut cases: Vec<Case> = Vec::new();
    let heads: Vec<Option<&Named>> = if named.is_empty() { vec![None] } else { named.iter().map(Some).collect() };
    for head in &heads {
        for number in 0..combinations {
            cases.push(case(*head, &combination(axes, number), section, loader)?);
        }
    }
    let mut folders: Vec<String> = cases.iter().map(|case| folder_name(&case.name)).collect();
    folders.sort_unstable();
    if let Some(pair) = folders.windows(2).find(|pair| pair[0] == pair[1]) {
        let message = format!("two cases of [sweep] would have one folder, `{}`", pair[0]);
        return Err(loader.fail(mark, &message, "use `[[sweep.case]]` with names"));
    }
    let baselines = baselines(section, &cases, combinations, loader)?;
    for (index, baseline) in baselines.into_iter().enumerate() {
        let own = heads[index / combinations].and_then(|head| head.expect.clone());
        let case = &mut cases[index];
        case.baseline = baseline;
        match (index == baseline, own) {
            (true, Some((Expect::Different, place))) => {
                let message = format!("case `{}` is the baseline and cannot differ from itself", case.name);
                return Err(loader.fail(&place, &message, "take it out, or name another `baseline` in [sweep]"));
            }
            (true, _) => {}
            (false, Some((own, _))) => case.expect = Some(own),
            (false, None) => case.expect = *expect,
        }
    }
    Ok(cases)
}

/// The values of combination `number`, of which the last list's changes fastest.
fn combination(axes: &[Axis], mut number: usize) -> Vec<(&Axis, usize)> {
    let mut picked: Vec<(&Axis, usize)> = Vec::with_capacity(axes.len());
    for axis in axes.iter().rev() {
        picked.push((axis, number % axis.values.len()));
        number /= axis.values.len();
    }
    picked.reverse();
    picked
}

fn case(head: Option<&Named>, values: &[(&Axis, usize)], section: &Section, loader: &Loader<'_>) -> Result<Case> {
    let mut layer = head.map(|head| head.layer.clone()).unwrap_or_default();
    let mut parts: Vec<String> = head.map(|head| head.name.clone()).into_iter().collect();
    for (axis, at) in values {
        let key = axis.path.join(".");
        parts.push(format!("{key}={}", axis.labels[*at]));
        let node = Node { key: axis.key.clone(), ..axis.values[*at].clone() };
        if insert(&mut layer, &axis.path, node).is_err() {
            let message = match head {
                Some(head) => format!("`{key}` is set by this list and by case `{}`", head.name),
                None => format!("`{key}` is set by this list and by another"),
            };
            return Err(loader.fail(&axis.key, &message, "take one of them out"));
        }
    }
    let seed = [Step::Key("run".into()), Step::Key("seed".into())];
    if let Some(node) = layer.find(&seed).filter(|_| !section.seeds.is_empty()) {
        return Err(loader.fail(&node.key, "`run.seed` is set by `seeds` in [sweep] too", "take one of them out"));
    }
    let name = if parts.is_empty() { "base".to_owned() } else { parts.join(",") };
    let mut settings = Vec::new();
    flatten(&layer, &mut Vec::new(), &mut settings);
    Ok(Case { name, baseline: 0, expect: None, settings, layer })
}

/// For each case the one that it is compared with.
fn baselines(section: &Section, cases: &[Case], combinations: usize, loader: &Loader<'_>) -> Result<Vec<usize>> {
    let Section { named, baseline, .. } = section;
    // A named case is the baseline of the others with the same values of all lists.
    let of_head = |head: usize| (0..cases.len()).map(|case| head * combinations + case % combinations).collect();
    let Some((name, place)) = baseline else {
        return Ok(if named.is_empty() { vec![0; cases.len()] } else { of_head(0) });
    };
    if let Some(case) = cases.iter().position(|case| case.name == *name) {
        return Ok(vec![case; cases.len()]);
    }
    if let Some(head) = named.iter().position(|head| head.name == *name) {
        return Ok(of_head(head));
    }
    let names = || named.iter().map(|head| &*head.name).chain(cases.iter().map(|case| &*case.name));
    let advice = match nearest(name, names()) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("cases are: {}", cases.iter().map(|case| &*case.name).take(8).collect::<Vec<_>>().join("; ")),
    };
    Err(loader.fail(place, &format!("no case is called `{name}`"), &advice))
}

/// Dotted keys and values.
fn flatten(tree: &Tree, path: &mut Vec<String>, found: &mut Vec<(String, toml::Value)>) {
    for (key, node) in &tree.0 {
        path.push(key.clone());
        match &node.body {
            Body::Table(inner) if !inner.0.is_empty() => flatten(inner, path, found),
            _ => found.push((path.join("."), node.plain())),
        }
        path.pop();
    }
}

#[cfg(test)]
mod tests;
