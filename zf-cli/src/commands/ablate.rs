//! `zf ablate`: all cases of a sweep, each in a process of its own, compared with a baseline.

mod child;
mod job;
mod report;
mod results;
mod show;

use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::Path;

use zf_core::Error;
use zf_core::config::Sweep;
use zf_core::record::METRICS;
use zf_core::registry::Registry;

use super::train::{creatable, default_folder};
use child::{Ended, Interrupts};
use job::{Before, CASES, Job};
use results::{Ablation, Outcome};
use show::Show;

/// Runs the cases of a sweep one after the other, seed by seed, with the overrides in all of them, and compares each
/// with its baseline of the same seed. Everything goes into the folder `out`: a run folder a case in `cases/`, with what
/// the case printed in `log.txt`, and the results as `ablation.csv` and `ablation.json`. With `resume`, runs in `out` that
/// are complete and have the same settings are not repeated, and those that were stopped go on.
///
/// # Errors
/// Before anything starts: a sweep that makes no sense, a case whose run file is wrong, a folder that holds something
/// else. At the end: cases that failed or were not as expected, after all have run. [`Error::Interrupted`] after a
/// signal, which is passed on to the case that is running.
pub fn run(
    file: &Path,
    overrides: &[String],
    out: Option<&Path>,
    resume: bool,
    write: &mut dyn Write,
) -> anyhow::Result<()> {
    not_launched(|name| std::env::var(name).ok())?;
    let registry = Registry::global()?;
    let sweep = Sweep::load(file, overrides, registry)?;
    let folder = out.map_or_else(|| default_folder(&stem(file)), Path::to_path_buf);
    let jobs = job::all(&sweep, &folder, registry)?;
    let _alone = occupy(&folder, resume)?;
    let mut interrupts = Interrupts::new()?;
    let mut show = Show::new(&sweep, jobs.len(), &folder);
    let mut outcomes = Vec::with_capacity(jobs.len());
    for job in &jobs {
        let outcome = match interrupts.seen() {
            true => Outcome::Stopped,
            false => one(job, resume, &mut interrupts, &mut show)?,
        };
        outcomes.push(outcome);
    }
    show.close();
    let interrupted = interrupts.seen() && outcomes.contains(&Outcome::Stopped);
    let ablation = Ablation::new(file, &sweep, &jobs, outcomes);
    report::write_files(&ablation, &folder)?;
    if interrupted {
        writeln!(write, "{} of {} runs are done", ablation.done(), jobs.len())?;
        writeln!(write, "go on with: zf ablate {} --out {} --resume", file.display(), folder.display())?;
        return Err(Error::Interrupted.into());
    }
    report::print(&ablation, &folder, write)?;
    match ablation.complaint() {
        None => Ok(()),
        Some(complaint) => {
            write.flush()?;
            Err(anyhow::Error::msg(complaint))
        }
    }
}

/// Runs one case, or finds that it has run.
fn one(job: &Job, resume: bool, interrupts: &mut Interrupts, show: &mut Show) -> Result<Outcome, Error> {
    let before = if resume { job.before()? } else { Before::Nothing };
    show.start(&job.name);
    if before == Before::Done {
        show.end(job, "was done before");
        return Ok(Outcome::Done);
    }
    if let Before::Other(key) = &before {
        let kept = job.move_aside()?;
        show.note(&format!("`{key}` has changed; the old run is kept as {}", kept.display()));
    }
    job.prepare()?;
    let goes_on = before == Before::Unfinished;
    let ended = child::train(job, goes_on, interrupts, &mut || show.tick(&job.folder))?;
    let outcome = match ended {
        Ended::Well => Outcome::Done,
        Ended::Badly(_) if interrupts.seen() => Outcome::Stopped,
        Ended::Badly(how) => Outcome::Failed { how, says: child::last_words(&job.log()) },
    };
    match &outcome {
        Outcome::Done => show.end(job, ""),
        Outcome::Failed { how, .. } => show.end(job, &format!("{how}, log: {}", job.log().display())),
        Outcome::Stopped => show.end(job, "stopped"),
    }
    Ok(outcome)
}

/// Refuses to run the whole sweep in each of several processes that a launcher started.
fn not_launched(variable: impl Fn(&str) -> Option<String>) -> Result<(), Error> {
    match variable("WORLD_SIZE").map(|world| world.parse::<usize>()) {
        Some(Ok(world)) if world > 1 => Err(Error::Config(format!(
            "a launcher started this as one of {world} processes; `zf ablate` starts its cases itself, run it without one"
        ))),
        _ => Ok(()),
    }
}

/// Makes the folder and keeps other sweeps out of it while the returned handle lives.
fn occupy(folder: &Path, resume: bool) -> Result<File, Error> {
    creatable(folder)?;
    if folder.join(METRICS).exists() {
        return Err(Error::Config(format!("{} holds a run; name another folder with --out", folder.display())));
    }
    let cases = folder.join(CASES);
    if cases.exists() && !resume {
        return Err(Error::Config(format!(
            "{} already holds a sweep; go on with --resume, or name another folder with --out",
            folder.display()
        )));
    }
    std::fs::create_dir_all(&cases).map_err(|error| Error::io(&cases, error))?;
    let handle = File::open(folder).map_err(|error| Error::io(folder, error))?;
    match handle.try_lock() {
        Err(TryLockError::WouldBlock) => Err(Error::Config(format!(
            "{}: another sweep is writing to this folder; wait for it, or name another folder",
            folder.display()
        ))),
        // Some network file systems lock no folders; there the user has to take care.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(handle),
    }
}

/// The file's name without folder and extension.
fn stem(file: &Path) -> String {
    file.file_stem().map_or_else(|| "sweep".to_owned(), |stem| stem.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launcher_is_refused() {
        let error = not_launched(|name| (name == "WORLD_SIZE").then(|| "2".to_owned())).expect_err("two of them");
        assert_eq!(error.exit_code(), 2);
        assert!(not_launched(|name| (name == "WORLD_SIZE").then(|| "1".to_owned())).is_ok());
        assert!(not_launched(|_| None).is_ok());
    }

    #[test]
    fn a_folder_belongs_to_one_sweep() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("a");
        let held = occupy(&folder, false).expect("new");
        let says = |error: Error, text: &str| assert!(error.to_string().contains(text), "{error}");
        says(occupy(&folder, false).expect_err("not new"), "already holds a sweep; go on with --resume");
        says(occupy(&folder, true).expect_err("locked"), "another sweep is writing");
        drop(held);
        drop(occupy(&folder, true).expect("free again"));
        std::fs::write(folder.join(METRICS), "").expect("writable");
        says(occupy(&folder, true).expect_err("a run"), "holds a run");
        says(occupy(&folder.join(METRICS).join("b"), true).expect_err("a file"), "is a file, not a folder");
    }
}
