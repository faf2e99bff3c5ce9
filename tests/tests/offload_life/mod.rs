//! The life of a run whose states are off the device: resumed at any step, under other settings, with faults of the host, the
//! link and the files, and with settings that make no sense.

mod absorb;
mod export;
mod faults;
mod hostile;
mod killed;
mod resume;

use std::path::{Path, PathBuf};

use zf_core::checkpoint::Checkpoint;
use zf_core::record::Summary;
use zf_core::train::{Observer, Silent};

use crate::lifecycle::{resume_from, run_file};

/// Short steps of a tiny model; `keys` replace the usual ones.
fn text(keys: &str) -> String {
    let usual = "run.steps = 16\nrun.global_batch = 6\nrun.micro_batch = 1\nrun.exact = true\ndata.sequence_length = 16\n\
         data.order = \"shuffled\"\nrun.checkpoint = { every = 1, keep = 99, best = false }\nschedule.kind = \"cosine\"\n\
         schedule.warmup = 3\nschedule.min_ratio = 0.1\n";
    let key = |line: &str| line.split_once(" =").map(|(key, _)| key.to_owned());
    let given: Vec<_> = keys.lines().map(key).collect();
    let kept = usual.lines().filter(|line| !given.contains(&key(line)));
    run_file("tiny-llama", &kept.chain(keys.lines()).map(|line| format!("{line}\n")).collect::<String>())
}

/// ZenFlow with S = 4 and k = 0.1, `more` beside.
fn zenflow(every: u64, more: &str) -> String {
    let usual = format!(
        "offload.kind = \"zenflow\"\noffload.update_interval = 4\nselect.kind = \"topk\"\nselect.ratio = 0.1\n\
         select.every = {every}\n"
    );
    let key = |line: &str| line.split_once(" =").map(|(key, _)| key.to_owned());
    let given: Vec<_> = more.lines().map(key).collect();
    let kept = usual.lines().filter(|line| !given.contains(&key(line)));
    text(&kept.chain(more.lines()).map(|line| format!("{line}\n")).collect::<String>())
}

/// The checkpoint of a step.
fn at(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("checkpoints/step-{step}"))
}

/// A run from its start to its end.
fn whole(text: &str, folder: &Path) -> Summary {
    zf_tests::training(text, folder).run(&mut Silent).unwrap_or_else(|error| panic!("{error}"))
}

/// A run in another folder, from a checkpoint to its end; its summary, and what it says at its start.
fn from(checkpoint: &Path, text: &str, folder: &Path) -> (Summary, Vec<String>) {
    let mut training = zf_tests::training(text, folder);
    training.resume = Some(resume_from(checkpoint));
    training.run.checkpoint.every = 0;
    let mut notes = Notes::default();
    let summary = training.run(&mut notes).unwrap_or_else(|error| panic!("from {}: {error}", checkpoint.display()));
    (summary, notes.0)
}

/// Keeps what a run says at its start.
#[derive(Default)]
struct Notes(Vec<String>);

impl Observer for Notes {
    fn start(&mut self, _first: u64, _steps: u64, notes: &[String]) {
        self.0 = notes.to_vec();
    }
}

/// What the progress of a checkpoint says of its offload.
fn offload(checkpoint: &Path) -> serde_json::Value {
    Checkpoint::open(checkpoint).expect("whole").meta().extra["progress"]["offload"].clone()
}
