//! States off the device, across the crates: what ZeRO-Offload and ZenFlow compute, carry over the link, and hold.

mod equal;
mod layouts;
mod memory;
mod moves;
mod oracle;
mod pace;
mod parameters;
mod random;
mod reference;
mod report;
mod turns;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use zf_core::Result;
use zf_core::engine::{OffloadStages, StepReport};
use zf_core::model::ParamSpec;
use zf_core::record::{METRICS, read_metrics};
use zf_core::registry::{BuildContext, Choice};
use zf_core::stage::{AccumulateOn, Axis, Candidates, Every, Links, Promotion, Score, Selector};
use zf_core::train::Silent;
use zf_offload::kinds::{HostConfig, IntervalConfig, ZenflowConfig};
use zf_offload::link::DirectConfig;
use zf_select::{Interval, TopKConfig};
use zf_tests::Ran;

use crate::lab::{Lab, bits};

/// ZenFlow with the best columns, over a link.
#[derive(Clone)]
struct Zenflow {
    config: ZenflowConfig,
    select: TopKConfig,
    links: Arc<dyn Links>,
}

impl Zenflow {
    /// Chooses a part `ratio` of columns every `every` updates; windows of `interval` updates, each visible one later.
    fn new(ratio: f64, interval: u64, every: u64) -> Self {
        let config = ZenflowConfig {
            update_interval: IntervalConfig::Fixed(interval),
            accumulate: AccumulateOn::Host,
            ..ZenflowConfig::default()
        };
        let score = Choice::named("l1");
        let select = TopKConfig { ratio, score, axis: Axis::Input, every: Interval::Updates(every) };
        Self { config, select, links: Arc::new(DirectConfig {}) }
    }

    /// Each window visible at its end.
    fn synchronous(self) -> Self {
        self.with(|zenflow| zenflow.config.asynchronous = false)
    }

    /// With pending updates of chosen columns when they would have become visible.
    fn late(self) -> Self {
        self.with(|zenflow| zenflow.config.promotion = Promotion::Late)
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    fn selector(&self) -> Arc<dyn Selector> {
        Arc::new(self.select.clone().selector(&BuildContext::default()).expect("in range"))
    }

    fn stages(&self) -> OffloadStages {
        let offload = self.config.clone().offload(&BuildContext::default()).expect("in range");
        OffloadStages { offload, selector: self.selector(), links: self.links.clone() }
    }

    fn of(&self, lab: &Lab) -> Lab {
        lab.with(|lab| lab.offload = Some(self.stages()))
    }

    /// The same with another selector than the best columns.
    fn choosing(&self, lab: &Lab, selector: Arc<dyn Selector>) -> Lab {
        lab.with(|lab| lab.offload = Some(OffloadStages { selector, ..self.stages() }))
    }
}

/// ZeRO-Offload.
fn host(lab: &Lab, change: impl FnOnce(&mut HostConfig)) -> Lab {
    let mut config = HostConfig::default();
    change(&mut config);
    let selector: Arc<dyn Selector> = Zenflow::new(1.0, 1, 1).selector();
    let offload = config.offload().expect("in range");
    lab.with(|lab| lab.offload = Some(OffloadStages { offload, selector, links: Arc::new(DirectConfig {}) }))
}

/// Takes `steps` steps and makes everything visible; what the steps did and the state's hash, on which all ranks agree.
fn drained(lab: &Lab, steps: usize) -> (Vec<StepReport>, String) {
    let ran = lab.run(|mut bench| {
        let reports = (0..steps).map(|_| bench.step()).collect::<Result<Vec<_>>>()?;
        bench.engine.drain()?;
        Ok((reports, bench.engine.state_hash()?))
    });
    let mut ran = ran.unwrap_or_else(|error| panic!("{}: {error}", lab.case()));
    let last = ran.pop().expect("at least one rank");
    for (rank, (reports, hash)) in ran.iter().enumerate() {
        assert_eq!(bits(reports), bits(&last.0), "rank {rank} disagrees on what happened");
        assert_eq!(hash, &last.1, "rank {rank} disagrees on the state");
    }
    last
}

/// That two labs give the same bits: losses, norms, decisions and, all made visible, the whole state.
fn same(case: &str, a: &Lab, b: &Lab, steps: usize) {
    expect(case, &drained(a, steps), b, steps);
}

/// That a lab gives bits that are known.
fn expect(case: &str, known: &(Vec<StepReport>, String), lab: &Lab, steps: usize) {
    let found = drained(lab, steps);
    let case = format!("{case}, {}", lab.case());
    assert_eq!(bits(&found.0), bits(&known.0), "{case}: what the steps did");
    assert_eq!(found.1, known.1, "{case}: state");
}

/// That a lab gives another state, so that the comparison of two equal ones shows something.
fn differ(case: &str, known: &(Vec<StepReport>, String), lab: &Lab, steps: usize) {
    assert_ne!(drained(lab, steps).1, known.1, "{case}, {}: the same state", lab.case());
}

/// Columns that were chosen: by update, by weight, those before and those from then on.
type Choices = BTreeMap<u64, BTreeMap<String, [Vec<u32>; 2]>>;

/// Writes down what another selector chooses, on which all ranks must agree.
#[derive(Debug)]
struct Recorder {
    inner: Box<dyn Selector>,
    /// Whether an engine has told it of its weights: the planner asks as well, with scores of its own.
    trains: AtomicBool,
    choices: Arc<Mutex<Choices>>,
}

impl Recorder {
    fn around(inner: &dyn Selector) -> (Arc<dyn Selector>, Arc<Mutex<Choices>>) {
        let choices = Arc::new(Mutex::new(Choices::new()));
        (Arc::new(Self { inner: inner.clone_box(), trains: false.into(), choices: choices.clone() }), choices)
    }
}

impl Selector for Recorder {
    fn clone_box(&self) -> Box<dyn Selector> {
        let trains = self.trains.load(Ordering::Relaxed).into();
        Box::new(Self { inner: self.inner.clone_box(), trains, choices: self.choices.clone() })
    }

    fn axis(&self) -> Axis {
        self.inner.axis()
    }

    fn every(&self) -> Every {
        self.inner.every()
    }

    fn score(&self) -> Option<&dyn Score> {
        self.inner.score()
    }

    fn check(&self, weights: &BTreeMap<&str, usize>) -> Result<()> {
        self.trains.store(true, Ordering::Relaxed);
        self.inner.check(weights)
    }

    fn choose(&mut self, weight: &Candidates<'_>) -> Result<Vec<u32>> {
        let chosen = self.inner.choose(weight)?;
        if !self.trains.load(Ordering::Relaxed) {
            return Ok(chosen);
        }
        let both = [weight.previous.to_vec(), chosen.clone()];
        let mut choices = self.choices.lock().expect("no thread panics while it writes");
        let before = choices.entry(weight.update).or_default().insert(weight.name.to_owned(), both.clone());
        assert!(before.is_none_or(|before| before == both), "the ranks choose other columns of {}", weight.name);
        Ok(chosen)
    }
}

/// Runs a run file to the end; what it left, what was chosen, and the parameters of the model.
fn train_recorded(text: &str) -> (Ran, Choices, Vec<ParamSpec>) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut training = zf_tests::training(text, folder.path());
    let choices = training.stages.offload.as_mut().map(|offload| {
        let (selector, choices) = Recorder::around(&*offload.selector);
        offload.selector = selector;
        choices
    });
    let specs = training.model.model.units().into_iter().flat_map(|unit| unit.params).collect();
    let summary = training.run(&mut Silent).unwrap_or_else(|error| panic!("{error}"));
    let records = read_metrics(&folder.path().join(METRICS)).expect("a run leaves metrics");
    let choices = choices.map_or_else(Choices::new, |choices| choices.lock().expect("no thread panicked").clone());
    (Ran { records, summary, folder }, choices, specs)
}

/// How many of `a` are not in `b`, both ascending.
fn beyond(a: &[u32], b: &[u32]) -> usize {
    a.iter().filter(|column| b.binary_search(column).is_err()).count()
}
