//! One rank fails: the run ends with an error that says which and when, and can go on from what was saved.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use zf_comm::{Counted, Failing, How, Log, When, wrap};
use zf_core::checkpoint::{Checkpoint, list};
use zf_core::model::{Batch, Context, LossSum, Model, UnitSpec};
use zf_core::record::Summary;
use zf_core::stage::{CommBytes, Request, Ticket, Transport};
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

/// The run file of these tests, in which `keys` replace the usual ones.
fn run_text(keys: &str) -> String {
    let key = |line: &str| line.split_once(" =").map(|(key, _)| key.to_owned());
    let given: Vec<_> = keys.lines().map(key).collect();
    let usual: String =
        KEYS.lines().filter(|line| !given.contains(&key(line))).map(|line| format!("{line}\n")).collect();
    run_file("tiny-llama", &format!("{usual}{keys}"))
}

/// Breaks a run, looks at its error and what it left, and goes on to the end of an undisturbed one.
fn check(keys: &str, breaks: impl FnOnce(&mut Training), expected: &[&str]) {
    let whole = tempfile::tempdir().expect("a folder");
    let undisturbed = finish(&run_text(keys), whole.path());
    check_against((whole.path(), &undisturbed), keys, breaks, expected);
}

/// The same with an undisturbed run that is there.
fn check_against(whole: (&Path, &Summary), keys: &str, breaks: impl FnOnce(&mut Training), expected: &[&str]) {
    let text = run_text(keys);
    let broken = tempfile::tempdir().expect("a folder");
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
    assert_same_run((broken.path(), &found), whole, &message).expect("whole");
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
        std::thread::sleep(Duration::from_secs(5));
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

/// The calls of rank 1 in one step, found by counting those of a whole run.
fn calls_of_a_step(keys: &str) -> std::ops::Range<u64> {
    let log = Log::default();
    let run = |steps: u64| {
        let text = run_text(&format!("run.steps = {steps}\nrun.checkpoint = {{ every = 0, best = false }}\n{keys}"));
        let folder = tempfile::tempdir().expect("a folder");
        let (mut training, log) = (zf_tests::training(&text, folder.path()), log.clone());
        training.fabric = wrap(training.fabric, move |_, inner| Box::new(Counted::new(inner, log.clone())));
        training.run(&mut Silent).unwrap_or_else(|error| panic!("{error}"));
    };
    let count = || log.take().iter().filter(|record| record.rank == 1).count() as u64;
    run(1);
    let one = count();
    run(2);
    let step = count() - one;
    5 * step..6 * step
}

/// Whatever call of a step it is at which a rank fails: gathers, reductions, the agreed message, publications.
fn at_each_phase(keys: &str, how: How) {
    let calls = calls_of_a_step(keys);
    assert!(calls.end - calls.start > 5, "{calls:?}");
    let whole = tempfile::tempdir().expect("a folder");
    let undisturbed = finish(&run_text(keys), whole.path());
    for tenth in [0, 2, 4, 6, 8, 9] {
        let number = calls.start + (calls.end - calls.start) * tenth / 10;
        let breaks = move |training: &mut Training| {
            training.fabric = wrap(training.fabric.clone(), move |rank, transport| match rank {
                1 => Box::new(Failing::new(transport, When::Issue(number), "the cable is cut").by(how)),
                _ => transport,
            });
        };
        check_against((whole.path(), &undisturbed), keys, breaks, &["rank 1", "the cable is cut"]);
    }
}

#[test]
fn an_error_in_each_phase_of_a_step_with_sharded_parameters() {
    at_each_phase("partition.stage = 3\n", How::Error);
}

#[test]
fn a_panic_in_each_phase_of_a_step() {
    at_each_phase("partition.stage = 3\n", How::Panic);
    at_each_phase("partition.stage = 2\n", How::Panic);
}

#[test]
fn a_rank_that_never_comes_in_each_phase_of_a_step() {
    let keys = "partition.stage = 3\n";
    let calls = calls_of_a_step(keys);
    let whole = tempfile::tempdir().expect("a folder");
    let undisturbed = finish(&run_text(keys), whole.path());
    for tenth in [1, 5, 9] {
        let number = calls.start + (calls.end - calls.start) * tenth / 10;
        let breaks = move |training: &mut Training| {
            let config = zf_comm::ThreadsConfig { ranks: 2, timeout: Duration::from_secs(3), ..Default::default() };
            let fabric = Arc::new(zf_comm::Threads::new(&config).expect("in range"));
            training.fabric = wrap(fabric, move |rank, inner| match rank {
                1 => Box::new(Sleepy { inner, number, issued: 0 }),
                _ => inner,
            });
        };
        check_against((whole.path(), &undisturbed), keys, breaks, &["rank 1", "did not arrive within 3 s"]);
    }
}

/// Sleeps before one call for longer than the others wait.
struct Sleepy {
    inner: Box<dyn Transport>,
    number: u64,
    issued: u64,
}

impl Transport for Sleepy {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world(&self) -> usize {
        self.inner.world()
    }

    fn issue(&mut self, request: Request) -> zf_core::Result<Ticket> {
        self.issued += 1;
        if self.issued == self.number + 1 {
            std::thread::sleep(Duration::from_secs(5));
        }
        self.inner.issue(request)
    }

    fn bytes(&self) -> CommBytes {
        self.inner.bytes()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}
