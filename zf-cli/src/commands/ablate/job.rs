//! The runs of a sweep, and what is there of each from before.

use std::path::{Path, PathBuf};

use zf_core::config::{Run, Sweep, folder_name};
use zf_core::files::write_atomic;
use zf_core::record::{SUMMARY, Summary};
use zf_core::registry::Registry;
use zf_core::{Error, slots};

/// The folder of the cases' run folders.
pub(super) const CASES: &str = "cases";

/// The resolved run of a case, from which it is started. It needs no other file, so that changes of the sweep do not reach
/// cases that have not begun.
const FILE: &str = "case.toml";

/// One case with one seed.
pub(super) struct Job {
    /// Index of its case.
    pub(super) case: usize,
    /// The seed, the run file's own where the sweep has none.
    pub(super) seed: u64,
    /// The case's name, with the seed where the sweep has seeds.
    pub(super) name: String,
    /// The run folder.
    pub(super) folder: PathBuf,
    text: String,
    settings: toml::Table,
}

/// What a resumed sweep finds of a run.
#[derive(Debug, PartialEq)]
pub(super) enum Before {
    /// Nothing.
    Nothing,
    /// It came to its end with the same settings.
    Done,
    /// It began with the same settings.
    Unfinished,
    /// It had other settings, of which this key is the first.
    Other(String),
}

/// All runs, checked, in the order in which they are to run: all cases of the first seed, then those of the next, so that
/// a slow drift of the machine's speed falls on all cases.
pub(super) fn all(sweep: &Sweep<'_>, folder: &Path, registry: &Registry) -> Result<Vec<Job>, Error> {
    let mut jobs = Vec::new();
    for seed in sweep.seeds() {
        for (index, case) in sweep.cases.iter().enumerate() {
            let run = sweep.run(case, seed)?;
            stages(&run, registry).map_err(|error| case.blame(error))?;
            let name = match seed {
                Some(seed) => format!("{},seed={seed}", case.name),
                None => case.name.clone(),
            };
            let text = format!("# Case `{name}` of `{}`.\n{}", run.name(), run.resolved_toml());
            let again = Run::from_toml_str_with(&text, FILE, &[], registry);
            let settings = again.and_then(|run| table(&run.resolved_toml()));
            let settings = settings
                .map_err(|error| Error::Engine(format!("case `{name}`: its resolved run cannot be read: {error}")))?;
            let folder = folder.join(CASES).join(folder_name(&name));
            jobs.push(Job { case: index, seed: run.run.seed, name, folder, text, settings });
        }
    }
    Ok(jobs)
}

/// Builds what needs neither model nor ranks: rules across the settings of a stage show only then.
fn stages(run: &Run, registry: &Registry) -> Result<(), Error> {
    let context = run.context();
    run.build::<slots::Partition>(registry, &context)?;
    run.build::<slots::Optim>(registry, &context)?;
    run.build::<slots::Schedule>(registry, &context)?;
    Ok(())
}

impl Job {
    /// The run file that it is started from.
    pub(super) fn file(&self) -> PathBuf {
        self.folder.join(FILE)
    }

    /// What it printed.
    pub(super) fn log(&self) -> PathBuf {
        self.folder.join("log.txt")
    }

    /// Makes the folder and writes the run file.
    pub(super) fn prepare(&self) -> Result<(), Error> {
        std::fs::create_dir_all(&self.folder).map_err(|error| Error::io(&self.folder, error))?;
        write_atomic(&self.file(), self.text.as_bytes())
    }

    /// What is there already.
    pub(super) fn before(&self) -> Result<Before, Error> {
        if !self.folder.exists() {
            return Ok(Before::Nothing);
        }
        let path = self.folder.join("run.toml");
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Before::Unfinished),
            Err(error) => return Err(Error::io(path, error)),
        };
        if let Some(key) = different(&table(&text).unwrap_or_default(), &self.settings) {
            return Ok(Before::Other(key));
        }
        let summary = Summary::read(&self.folder.join(SUMMARY));
        Ok(if summary.is_ok_and(|summary| summary.complete) { Before::Done } else { Before::Unfinished })
    }

    /// Renames the run folder, so that another run can have its name; the new name.
    pub(super) fn move_aside(&self) -> Result<PathBuf, Error> {
        let name = self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let kept = (1..).map(|number| self.folder.with_file_name(format!("{name}.old-{number}")));
        let kept = kept.into_iter().find(|path| !path.exists()).expect("numbers do not run out before folders do");
        std::fs::rename(&self.folder, &kept).map_err(|error| Error::io(&self.folder, error))?;
        Ok(kept)
    }
}

fn table(text: &str) -> Result<toml::Table, Error> {
    text.parse().map_err(|error: toml::de::Error| Error::Config(error.to_string()))
}

/// The first key, by name, that is not the same in both.
fn different(a: &toml::Table, b: &toml::Table) -> Option<String> {
    let mut keys: Vec<&String> = a.keys().chain(b.keys()).collect();
    keys.sort_unstable();
    keys.into_iter().find_map(|key| match (a.get(key), b.get(key)) {
        (Some(toml::Value::Table(a)), Some(toml::Value::Table(b))) => Some(format!("{key}.{}", different(a, b)?)),
        (a, b) => (a != b).then(|| key.clone()),
    })
}
