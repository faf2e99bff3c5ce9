//! The host, its files or its link fail, a gradient is no number, the run is killed: it ends within seconds with an error that
//! says who failed and when, or skips the step on all ranks, and goes on from what was saved to the same bits.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tch::{Kind, Tensor};
use zf_core::checkpoint::{Checkpoint, list};
use zf_core::model::{Batch, Context, LossSum, Model, Noise, Params, UnitFn, UnitSpec};
use zf_core::stage::{
    HostPool, HostSlice, Hyper, Link, Links, Offload, OffloadPolicy, Optimizer, OptimizerBase, Site, Span, TensorSlice,
    Tier, TierBytes, Traffic, Transfer,
};
use zf_core::trace::Trace;
use zf_core::train::{Silent, Training};
use zf_core::{Error, Result};
use zf_offload::tier::{FileSettings, FileTier, MemoryTier};
use zf_offload::worker::Worker;

use super::{at, from, offload, whole, zenflow};
use crate::lifecycle::{assert_same_run, finish, history, newest, records};

const TWO: &str = "run.steps = 10\ntransport.ranks = 2\ntransport.timeout = \"20s\"\n";

/// What is done to a run before it starts.
type Breaks = Box<dyn FnOnce(&mut Training)>;

/// Breaks a run in several ways, looks each time at its error and at what it left, and goes on to the end of an undisturbed one.
fn check(keys: &str, faults: Vec<(Breaks, &[&str])>) {
    let stage = if keys.contains("partition.stage") { "" } else { "partition.stage = 1\n" };
    let text = zenflow(4, &format!("{TWO}{stage}{keys}"));
    let whole_run = tempfile::tempdir().expect("a folder");
    let undisturbed = whole(&text, whole_run.path());
    for (breaks, expected) in faults {
        let broken = tempfile::tempdir().expect("a folder");
        let mut training = zf_tests::training(&text, broken.path());
        breaks(&mut training);
        let started = Instant::now();
        let error = training.run(&mut Silent).expect_err("something failed");
        assert!(started.elapsed() < Duration::from_secs(30), "the end took {:?}", started.elapsed());
        assert_eq!(error.exit_code(), 1, "{error}");
        let message = error.to_string();
        for part in expected {
            assert!(message.contains(part), "`{part}` is missing in: {message}");
        }
        let saved = list(&broken.path().join("checkpoints")).expect("readable");
        assert!(saved.len() >= 2, "what was saved is gone: {saved:?}");
        for (step, path) in &saved {
            let checkpoint = Checkpoint::open(path).unwrap_or_else(|error| panic!("step {step}: {error}"));
            checkpoint.verify().unwrap_or_else(|error| panic!("step {step}: {error}"));
        }
        let left = std::fs::read_dir(broken.path().join("states")).map_or(0, Iterator::count);
        assert_eq!(left, 0, "files of states are left");
        let found = finish(&text, broken.path());
        assert_same_run((broken.path(), &found), (whole_run.path(), &undisturbed), &message).expect("whole");
    }
}

/// What happens at a call.
type Fault = fn() -> Result<()>;

fn fails() -> Result<()> {
    Err(Error::Engine("a bit fell over".into()))
}

fn panics() -> Result<()> {
    panic!("index out of bounds")
}

/// Has `fault` happen at call `at` of those that are counted.
struct Trap {
    calls: AtomicU64,
    at: u64,
    fault: Fault,
}

impl Trap {
    fn new(at: u64, fault: Fault) -> Arc<Self> {
        Arc::new(Self { calls: AtomicU64::new(0), at, fault })
    }

    fn spring(&self) -> Result<()> {
        if self.calls.fetch_add(1, Ordering::SeqCst) == self.at { (self.fault)() } else { Ok(()) }
    }
}

/// A rule that fails on the host of rank 1.
struct Breaking(Arc<dyn Optimizer>, Arc<Trap>);

impl Optimizer for Breaking {
    fn base(&self) -> &OptimizerBase {
        self.0.base()
    }

    fn state(&self) -> &'static [&'static str] {
        self.0.state()
    }

    fn apply(&self, slice: &mut HostSlice<'_>, hyper: &Hyper) -> Result<()> {
        let name = std::thread::current().name().map(str::to_owned);
        // Where the host has more threads, they have no names.
        if name.is_none_or(|name| name == "zf-host-1") {
            self.1.spring()?;
        }
        self.0.apply(slice, hyper)
    }

    fn apply_tensor(&self, slice: &TensorSlice<'_>, hyper: &Hyper) -> Result<()> {
        self.0.apply_tensor(slice, hyper)
    }
}

fn rule(at: u64, fault: Fault) -> Breaks {
    Box::new(move |training| {
        let inner = Arc::clone(&training.stages.optimizer);
        training.stages.optimizer = Arc::new(Breaking(inner, Trap::new(at, fault)));
    })
}

const WORKER: &str = "the host worker of rank 1";

#[test]
fn a_worker_that_panics() {
    const SAYS: &[&str] = &["rank 1, step", WORKER, "panicked", "index out of bounds"];
    check("", vec![(rule(60, panics), SAYS), (rule(150, panics), SAYS)]);
    check("offload.promotion = \"late\"\n", vec![(rule(60, panics), SAYS)]);
    check("offload.asynchronous = false\n", vec![(rule(60, panics), SAYS)]);
}

#[test]
fn one_of_the_threads_of_a_worker_panics() {
    const SAYS: &[&str] = &["step", "the host worker of rank", "panicked", "index out of bounds"];
    check("host.threads = 3\n", vec![(rule(80, panics), SAYS)]);
}

#[test]
fn a_worker_that_fails() {
    const SAYS: &[&str] = &["rank 1, step", WORKER, "a bit fell over"];
    check("partition.stage = 3\n", vec![(rule(60, fails), SAYS)]);
    check("offload.accumulate = \"device\"\n", vec![(rule(60, fails), SAYS)]);
}

/// A tier that fails at a call, on rank 1.
struct BreakingTier(Box<dyn Tier>, Option<Arc<Trap>>);

impl BreakingTier {
    fn spring(&self) -> Result<()> {
        self.1.as_ref().map_or(Ok(()), |trap| trap.spring())
    }
}

impl Tier for BreakingTier {
    fn announce(&mut self, spans: &[Span]) -> Result<()> {
        self.0.announce(spans)
    }

    fn with(&mut self, span: &Span, f: &mut dyn FnMut(&mut [&mut [f32]]) -> Result<()>) -> Result<()> {
        self.spring()?;
        self.0.with(span, f)
    }

    fn flush(&mut self) -> Result<()> {
        self.spring()?;
        self.0.flush()
    }

    fn bytes(&self) -> TierBytes {
        self.0.bytes()
    }
}

/// The policy of another offload, over tiers that fail.
#[derive(Debug)]
struct Tiers {
    inner: Arc<dyn Offload>,
    at: u64,
    fault: Fault,
    file: bool,
}

impl Offload for Tiers {
    fn policy(&self) -> Option<OffloadPolicy> {
        self.inner.policy()
    }

    fn open(&self, site: Site) -> Result<Box<dyn HostPool>> {
        let arrays = 1 + site.optimizer.state().len();
        let tier: Box<dyn Tier> = match self.file {
            true => {
                let folder = site.folder.join("states");
                Box::new(FileTier::new(&folder, &site.lens, arrays, &FileSettings::default())?)
            }
            false => Box::new(MemoryTier::new(&site.lens, arrays)?),
        };
        let trap = (site.rank == 1).then(|| Trap::new(self.at, self.fault));
        Ok(Box::new(Worker::start(site, Box::new(BreakingTier(tier, trap)), 2)?))
    }
}

fn tier(at: u64, fault: Fault, file: bool) -> Breaks {
    Box::new(move |training| {
        let stages = training.stages.offload.as_mut().expect("an offload");
        stages.offload = Arc::new(Tiers { inner: Arc::clone(&stages.offload), at, fault, file });
    })
}

fn system(code: i32) -> Result<()> {
    Err(Error::io(Path::new("states/buffer-3"), std::io::Error::from_raw_os_error(code)))
}

fn input_output() -> Result<()> {
    system(5)
}

fn no_space() -> Result<()> {
    system(28)
}

/// Wherever it is that a tier fails: on loading, updating, moving columns, saving.
#[test]
fn a_tier_that_fails() {
    const READS: &[&str] = &["rank 1, step", WORKER, "states/buffer-3", "Input/output error"];
    let full: &[&str] = &["rank 1, step", WORKER, "states/buffer-3", "No space left"];
    let panicked: &[&str] = &["rank 1, step", WORKER, "index out of bounds"];
    let mut faults: Vec<_> = [400, 550].map(|at| (tier(at, input_output, false), READS)).into();
    faults.push((tier(450, no_space, true), full));
    faults.push((tier(500, panics, true), panicked));
    check("", faults);
}

/// A link that fails at a transfer: on the spot, or when it should have arrived.
struct BreakingLink {
    inner: Arc<dyn Link>,
    trap: Option<Arc<Trap>>,
    later: bool,
}

impl Link for BreakingLink {
    fn issue(&self, mut transfer: Transfer) -> Result<()> {
        let Err(error) = self.trap.as_ref().map_or(Ok(()), |trap| trap.spring()) else {
            return self.inner.issue(transfer);
        };
        if self.later {
            let done = std::mem::replace(&mut transfer.done, Box::new(|_| {}));
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(20));
                done(Err(error));
            });
            return Ok(());
        }
        (transfer.done)(Err(fails().expect_err("always")));
        Err(error)
    }

    fn host_memory(&self, numel: usize, kind: Kind) -> Result<Tensor> {
        self.inner.host_memory(numel, kind)
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}

#[derive(Debug)]
struct BreakingLinks {
    inner: Arc<dyn Links>,
    at: u64,
    later: bool,
}

impl Links for BreakingLinks {
    fn open(&self, rank: usize, device: tch::Device, cores: &[usize], trace: &Trace) -> Result<Arc<dyn Link>> {
        let trap = (rank == 1).then(|| Trap::new(self.at, fails));
        Ok(Arc::new(BreakingLink { inner: self.inner.open(rank, device, cores, trace)?, trap, later: self.later }))
    }
}

/// Gradients, columns up and down, parameters: whatever the transfer was for.
#[test]
fn a_link_that_fails() {
    let breaks = |at: u64, later: bool| -> Breaks {
        Box::new(move |training: &mut Training| {
            let stages = training.stages.offload.as_mut().expect("an offload");
            stages.links = Arc::new(BreakingLinks { inner: Arc::clone(&stages.links), at, later });
        })
    };
    let says: &[&str] = &["rank 1, step", "a bit fell over"];
    let cases = [(30, false), (31, true), (35, false), (38, true)];
    check("", cases.map(|(at, later)| (breaks(at, later), says)).into());
}

/// In one step the gradient of the first element of one unit is no number on rank 1. The loss is what it would be.
struct NoNumber {
    inner: Arc<dyn Model>,
    step: u64,
}

struct Within<'a>(&'a dyn Context);

impl Context for Within<'_> {
    fn run(&self, unit: usize, inputs: &[Tensor], f: UnitFn) -> Result<Vec<Tensor>> {
        if unit != 2 {
            return self.0.run(unit, inputs, f);
        }
        let poisoned: UnitFn = Arc::new(move |params: &Params<'_>, inputs: &[Tensor]| {
            // The slope of a root at zero is infinite, and zero times it no number.
            let nothing = params.at(0)?.f_flatten(0, -1)?.f_narrow(0, 0, 1)?.f_mul_scalar(0.0)?.f_sqrt()?;
            let mut outputs = f(params, inputs)?;
            outputs[0] = outputs[0].f_add(&nothing)?;
            Ok(outputs)
        });
        self.0.run(unit, inputs, poisoned)
    }

    fn skip(&self, unit: usize) -> Result<()> {
        self.0.skip(unit)
    }

    fn training(&self) -> bool {
        self.0.training()
    }

    fn noise(&self) -> Noise {
        self.0.noise()
    }

    fn dtype(&self) -> Kind {
        self.0.dtype()
    }

    fn device(&self) -> tch::Device {
        self.0.device()
    }
}

impl Model for NoNumber {
    fn units(&self) -> Vec<UnitSpec> {
        self.inner.units()
    }

    fn loss(&self, cx: &dyn Context, batch: &Batch) -> anyhow::Result<LossSum> {
        let hit = std::thread::current().name() == Some("rank-1") && cx.training() && cx.noise().step == self.step;
        if hit { self.inner.loss(&Within(cx), batch) } else { self.inner.loss(cx, batch) }
    }

    fn vocabulary(&self) -> usize {
        self.inner.vocabulary()
    }
}

/// All ranks skip; no window goes on and no column moves. The same after a resumption right before, or right after.
fn skips(keys: &str, step: u64) {
    let text = zenflow(4, &format!("run.steps = 12\ntransport.ranks = 2\n{keys}"));
    let poisoned = |training: &mut Training| {
        let inner = Arc::clone(&training.model.model);
        training.model.model = Arc::new(NoNumber { inner, step });
    };
    let run = |checkpoint: Option<&Path>, folder: &Path| {
        let mut training = zf_tests::training(&text, folder);
        training.resume = checkpoint.map(crate::lifecycle::resume_from);
        poisoned(&mut training);
        training.run(&mut Silent).unwrap_or_else(|error| panic!("{keys}: {error}"))
    };
    let folder = tempfile::tempdir().expect("a folder");
    let expected = run(None, folder.path());
    let skipped: Vec<u64> = records(folder.path()).iter().filter(|r| r.skipped).map(|r| r.step).collect();
    assert_eq!(skipped, [step], "{keys}");
    let (before, after) = (at(folder.path(), step), at(folder.path(), step + 1));
    assert_eq!(offload(&before), offload(&after), "{keys}");
    let again = tempfile::tempdir().expect("a folder");
    assert_eq!(run(Some(&before), again.path()).state_hash, expected.state_hash, "{keys}: resumed before it");
    // Saved right after a resumption, without an update between.
    let twice = tempfile::tempdir().expect("a folder");
    assert_eq!(
        run(Some(&at(again.path(), step + 1)), twice.path()).state_hash,
        expected.state_hash,
        "{keys}: and after it"
    );
    assert_eq!(history(twice.path())[..], history(folder.path())[step as usize + 1..], "{keys}");
}

#[test]
fn a_gradient_that_is_no_number() {
    skips("partition.stage = 1\n", 6);
    skips("partition.stage = 2\n", 8);
    skips("partition.stage = 3\noffload.asynchronous = false\n", 6);
    skips("partition.stage = 1\noffload.promotion = \"late\"\nselect.ratio = 0.3\n", 8);
    skips("partition.stage = 1\noffload.promotion = \"late\"\nselect.ratio = 0.3\n", 9);
    skips("partition.stage = 0\noffload.accumulate = \"device\"\n", 5);
    skips("partition.stage = 2\noffload.warmup = 6\nrun.dtype = \"bfloat16\"\n", 3);
    skips("partition.stage = 2\noffload.warmup = 6\n", 6);
}

#[test]
fn a_gradient_that_is_no_number_under_zero_offload() {
    for (stage, step) in [(1, 0), (2, 5), (3, 6)] {
        let keys = format!("partition.stage = {stage}\ntransport.ranks = 2\noffload.kind = \"host\"\n");
        let text = super::text(&keys);
        let poisoned = |training: &mut Training| {
            let inner = Arc::clone(&training.model.model);
            training.model.model = Arc::new(NoNumber { inner, step });
        };
        let hash = |text: &str| {
            let folder = tempfile::tempdir().expect("a folder");
            let mut training = zf_tests::training(text, folder.path());
            poisoned(&mut training);
            let summary = training.run(&mut Silent).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(records(folder.path()).iter().filter(|record| record.skipped).count(), 1, "stage {stage}");
            summary.state_hash
        };
        assert_eq!(hash(&text), hash(&text.replace("offload.kind = \"host\"\n", "")), "stage {stage}");
    }
}

/// A device without the room: the message says whose, when, and what to do; before the first step nothing is left behind.
#[test]
fn a_full_device() {
    let folder = tempfile::tempdir().expect("a folder");
    let keys = |memory: &str| {
        zenflow(
            4,
            &format!(
                "{TWO}partition.stage = 1\ndevice.kind = \"emulated\"\ndevice.memory = \"{memory}\"\noffload.buffer = \"64KB\"\n"
            ),
        )
    };
    let error = zf_tests::training(&keys("600KB"), folder.path()).run(&mut Silent).expect_err("no room").to_string();
    assert!(error.contains("rank ") && error.contains("600"), "{error}");
    assert_eq!(newest(folder.path()), None);
    whole(&keys("64MB"), folder.path());
}

/// A run that goes on where the last one ended knows nothing of what failed.
#[test]
fn workers_end_with_their_run() {
    if !zf_tests::alone("offload_life::faults::workers_end_with_their_run") {
        return;
    }
    let threads = || std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    let folder = tempfile::tempdir().expect("a folder");
    let text = zenflow(4, "transport.ranks = 2\nrun.steps = 3\noffload.tier = \"file\"\n");
    whole(&text, folder.path());
    let before = threads();
    for _ in 0..3 {
        let folder = tempfile::tempdir().expect("a folder");
        whole(&text, folder.path());
        let (_, notes) = from(&at(folder.path(), 2), &text, tempfile::tempdir().expect("a folder").path());
        assert!(!notes.iter().any(|note| note.contains("earlier runs left")), "{notes:?}");
    }
    assert!(threads() <= before, "{} threads, {before} before", threads());
}
