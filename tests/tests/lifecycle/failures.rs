//! One rank fails: the run ends with an error that says which and when, and can go on from what was saved.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use zf_comm::{Failing, When, wrap};
use zf_core::checkpoint::{Checkpoint, list};
use zf_core::model::{Batch, Context, LossSum, Model, UnitSpec};
use zf_core::train::{Silent, Training};

use super::{assert_same_run, finish, run_file};

const KEYS: &str = "run.steps = 8\nrun.global_batch = 8\nrun.micro_batch = 2\ndata.sequence_length = 32\n\
     data.order = \"shuffled\"\nrun.checkpoint = { every = 2, keep = 9, best = false }\ntransport.ranks = 2\n\
     partition.stage = 1\ntransport.timeout = \"20s\"\n";

type Fault = Box<dyn Fn() -> anyhow::Result<()> + Send + Sync>;

/// Fails once, on rank 1 in step 5.
struct Broken {
    inner: Arc<dyn Model>,
    fault: Fault,
    done: AtomicBool,
}

impl Model for Broken {
    fn units(&self) -> Vec<UnitSpec> {
        self.inner.units()
    }

    fn loss(&self, cx: &dyn Context, batch: &Batch) -> anyhow::Result<LossSum> {
        let here = std::thread::current().name() == Some("rank-1") && cx.noise().step == 5;
        if here && !self.done.swap(true, Ordering::SeqCst) {
            (self.fault)()?;
        }
        self.inner.loss(cx, batch)
    }

    fn vocabulary(&self) -> usize {
        self.inner.vocabulary()
    }
}

/// Breaks a run, looks at its error and what it left, and goes on to the end of an undisturbed one.
fn check(keys: &str, breaks: impl FnOnce(&mut Training), expected: &[&str]) {
    let text = run_file("tiny-llama", &format!("{KEYS}{keys}"));
    let (whole, broken) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let undisturbed = finish(&text, whole.path());
    let mut training = zf_tests::training(&text, broken.path());
    breaks(&mut training);
    let started = Instant::now();
    let error = training.run(&mut Silent).expect_err("a rank failed");
    assert!(started.elapsed() < Duration::from_secs(60), "the end took {:?}", started.elapsed());
    assert_eq!(error.exit_code(), 1, "{error}");
    let message = error.to_string();
    for part in expected {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
    let saved = list(&broken.path().join("checkpoints")).expect("readable");
    assert!(saved.iter().any(|(step, _)| *step == 2), "the first checkpoint is gone: {saved:?}");
    for (step, path) in &saved {
        let checkpoint = Checkpoint::open(path).unwrap_or_else(|error| panic!("step {step}: {error}"));
        checkpoint.verify().unwrap_or_else(|error| panic!("step {step}: {error}"));
    }
    let found = finish(&text, broken.path());
    assert_same_run((broken.path(), &found), (whole.path(), &undisturbed), &message).expect("whole");
}

fn broken(fault: impl Fn() -> anyhow::Result<()> + Send + Sync + 'static) -> impl FnOnce(&mut Training) {
    move |training| {
        let inner = training.model.model.clone();
        training.model.model = Arc::new(Broken { inner, fault: Box::new(fault), done: AtomicBool::new(false) });
    }
}

#[test]
fn a_model_that_fails() {
    check("", broken(|| anyhow::bail!("the disk of the lookup table is full")), &["rank 1", "step 5", "lookup table"]);
}

#[test]
fn a_model_that_panics() {
    check("", broken(|| panic!("index out of bounds")), &["rank 1", "index out of bounds"]);
}

#[test]
fn a_rank_that_does_not_come() {
    let sleeps = || {
        std::thread::sleep(Duration::from_secs(6));
        Ok(())
    };
    let text = |training: &mut Training| {
        // Only the rank that sleeps is late: the others come within milliseconds.
        let config = zf_comm::ThreadsConfig { ranks: 2, timeout: Duration::from_secs(3), ..Default::default() };
        training.fabric = Arc::new(zf_comm::Threads::new(&config).expect("in range"));
    };
    check(
        "",
        move |training| {
            text(training);
            broken(sleeps)(training);
        },
        &["rank 1", "3"],
    );
}

#[test]
fn a_transport_that_fails() {
    for when in [When::Issue(40), When::Wait(40)] {
        let breaks = move |training: &mut Training| {
            training.fabric = wrap(training.fabric.clone(), move |rank, transport| {
                if rank == 1 { Box::new(Failing::new(transport, when, "the cable is cut")) } else { transport }
            });
        };
        check("", breaks, &["rank 1", "the cable is cut"]);
    }
}
