//! Bytes on the link against the formulas: gradients of the columns that are not chosen, parameters once a window, and the states
//! of columns that change their tier, counted apart. From `metrics.jsonl` and `summary.json` of real runs.

use zf_core::model::ParamSpec;
use zf_core::record::LinkBytes;
use zf_tests::tiny;

use super::{Choices, beyond, train_recorded};

const STEPS: u64 = 11;

/// A run in float32, with enough buffers that what a step sends leaves in that step.
struct Case {
    interval: u64,
    every: u64,
    settings: &'static str,
    run: &'static str,
}

impl Case {
    fn is(&self, what: &str) -> bool {
        self.settings.contains(what)
    }

    fn train(&self) -> (zf_tests::Ran, Counted) {
        let Case { interval, every, settings, run } = self;
        let (ran, choices, specs) = train_recorded(&tiny(
            "tiny-gpt2",
            &format!(
                "run.steps = {STEPS}\nrun.global_batch = 4\nrun.micro_batch = 1\nrun.exact = true\n\
                 offload = {{ kind = \"zenflow\", update_interval = {interval}, buffers = 64, {settings} }}\n\
                 select = {{ kind = \"topk\", ratio = 0.2, every = {every} }}\n{run}\n"
            ),
        ));
        let counted = Counted::new(&choices, &specs, *every);
        assert_eq!(choices.len() as u64, STEPS.div_ceil(*every), "times that columns were chosen");
        (ran, counted)
    }

    /// How many updates the window of this step has, where the step ends it: the last window is cut short by the end of the run.
    fn ends(&self, step: u64) -> bool {
        (step + 1).is_multiple_of(self.interval) || step + 1 == STEPS
    }
}

/// Elements of all weights with columns.
struct Counted {
    /// Not chosen, by step.
    rest: Vec<u64>,
    promoted: Vec<u64>,
    demoted: Vec<u64>,
}

/// Elements of one column.
fn column(spec: &ParamSpec) -> u64 {
    let columns = spec.shape[spec.input_dim.expect("a weight with columns")].unsigned_abs();
    spec.numel() as u64 / columns
}

impl Counted {
    fn new(choices: &Choices, specs: &[ParamSpec], every: u64) -> Self {
        let (mut rest, mut promoted, mut demoted) = (Vec::new(), Vec::new(), Vec::new());
        for step in 0..STEPS {
            let weights = &choices[&(step - step % every)];
            let sum = |count: &dyn Fn(&[Vec<u32>; 2]) -> usize| {
                let of = |name: &String| specs.iter().find(|spec| spec.name == *name).expect("a parameter");
                weights.iter().map(|(name, both)| count(both) as u64 * column(of(name))).sum::<u64>()
            };
            let chosen = sum(&|[_, now]| now.len());
            rest.push(
                specs.iter().filter(|spec| spec.shape.len() == 2).map(|spec| spec.numel() as u64).sum::<u64>() - chosen,
            );
            let now = step.is_multiple_of(every);
            promoted.push(if now { sum(&|[before, now]| beyond(now, before)) } else { 0 });
            demoted.push(if now { sum(&|[before, now]| beyond(before, now)) } else { 0 });
        }
        assert!(promoted.iter().skip(1).any(|&elements| elements > 0), "columns change");
        Self { rest, promoted, demoted }
    }
}

/// The bytes of each step but parameters, which come when they come; and those of parameters in all, from and to.
fn formula(case: &Case, counted: &Counted) -> (Vec<LinkBytes>, [u64; 2]) {
    let (mut steps, mut parameters, mut withdrawn) = (Vec::new(), 0, 0);
    for step in 0..STEPS {
        let at = usize::try_from(step).expect("few");
        let (promoted, demoted) = (counted.promoted[at], counted.demoted[at]);
        let on_device = case.is("\"device\"");
        let to_host = if !on_device || case.ends(step) { 4 * counted.rest[at] } else { 0 };
        // A pending update's gradients come along where they are applied later.
        let pending = step >= case.interval && !case.is("asynchronous = false");
        let late = if pending && case.is("\"late\"") { 4 * promoted } else { 0 };
        steps.push(LinkBytes { to_host, to_device: 0, moves: 12 * (promoted + demoted) + late });
        parameters += if case.ends(step) { 4 * counted.rest[at] } else { 0 };
        withdrawn += if pending { 4 * promoted } else { 0 };
    }
    // What was pending for columns that became chosen is not sent where the update had not been made; with late promotion it
    // never is, with flush that depends on how far the host was.
    let least = parameters - withdrawn;
    (steps, if case.is("\"late\"") { [least, least] } else { [least, parameters] })
}

const CASES: [(u64, u64, &str); 6] = [
    (2, 2, "accumulate = \"host\""),
    (2, 4, "accumulate = \"host\", promotion = \"late\""),
    (3, 3, "accumulate = \"device\""),
    (2, 2, "accumulate = \"device\", promotion = \"late\""),
    (2, 4, "accumulate = \"host\", asynchronous = false"),
    (1, 1, "accumulate = \"host\", promotion = \"late\""),
];

#[test]
fn every_step_carries_what_the_formula_says() {
    for (interval, every, settings) in CASES {
        let case = Case { interval, every, settings, run: "" };
        let (ran, counted) = case.train();
        let (expected, [least, most]) = formula(&case, &counted);
        // Columns that a step chooses arrive in its course or in that of the next.
        let (mut moved, mut due) = (0, 0);
        for (record, expected) in ran.records.iter().zip(&expected) {
            let step = format!("{settings}, S = {interval}, step {}", record.step);
            assert_eq!(record.link_bytes.to_host, expected.to_host, "{step}");
            moved += record.link_bytes.moves;
            assert!((due..=due + expected.moves).contains(&moved), "{step}: {moved} bytes moved, {due} due before");
            due += expected.moves;
        }
        let whole = &ran.summary.per_rank[0].link_bytes;
        assert_eq!(whole.moves, due, "{settings}, S = {interval}");
        let came = whole.to_device;
        assert!((least..=most).contains(&came), "{settings}: {came} bytes of parameters, expected {least} to {most}");
    }
}

/// The ranks together carry what one would; under stage 0 each carries all of it.
#[test]
fn all_ranks_carry_the_formula() {
    for (ranks, stage, (interval, every, settings)) in [(2, 1, CASES[1]), (4, 3, CASES[3]), (2, 0, CASES[1])] {
        let run = match (ranks, stage) {
            (2, 1) => "transport.ranks = 2\npartition.stage = 1",
            (2, 0) => "transport.ranks = 2\npartition.stage = 0",
            _ => "transport.ranks = 4\npartition.stage = 3",
        };
        let case = Case { interval, every, settings, run };
        let (ran, counted) = case.train();
        let (steps, [least, most]) = formula(&case, &counted);
        let times = if stage == 0 { 2 } else { 1 };
        let sum =
            |of: &dyn Fn(&LinkBytes) -> u64| ran.summary.per_rank.iter().map(|rank| of(&rank.link_bytes)).sum::<u64>();
        let whole = |of: &dyn Fn(&LinkBytes) -> u64| times * steps.iter().map(of).sum::<u64>();
        assert_eq!(sum(&|bytes| bytes.to_host), whole(&|bytes| bytes.to_host), "stage {stage}: gradients");
        assert_eq!(sum(&|bytes| bytes.moves), whole(&|bytes| bytes.moves), "stage {stage}: moves");
        let came = sum(&|bytes| bytes.to_device);
        assert!((times * least..=times * most).contains(&came), "stage {stage}: {came}, not {least} to {most}");
    }
}

/// With 16 bits on the link, in fast mode; and all parameters both ways in every step of ZeRO-Offload.
#[test]
fn sixteen_bits_halve_it() {
    let keys = |offload: &str| {
        let keys = "run.steps = 4\nrun.global_batch = 4\nrun.micro_batch = 2\nrun.dtype = \"bfloat16\"\n";
        tiny("tiny-llama", &format!("{keys}offload = {{ {offload} }}\n"))
    };
    let (ran, _, specs) = train_recorded(&keys("kind = \"host\", buffers = 64"));
    let all: u64 = specs.iter().map(|spec| spec.numel() as u64).sum();
    let bytes = ran.summary.per_rank[0].link_bytes;
    assert_eq!(bytes, LinkBytes { to_host: 4 * 2 * all, to_device: 4 * 2 * all, moves: 0 });
    for (accumulate, times) in [("host", 4), ("device", 2)] {
        let (ran, choices, specs) = train_recorded(&keys(&format!(
            "kind = \"zenflow\", update_interval = 2, buffers = 64, accumulate = \"{accumulate}\" }}\n\
             select = {{ kind = \"topk\", ratio = 0.25, every = 4"
        )));
        let weights: Vec<&ParamSpec> = specs.iter().filter(|spec| spec.shape.len() == 2).collect();
        let chosen = |spec: &&ParamSpec| choices[&0][&spec.name][1].len() as u64 * column(spec);
        let on_device: u64 = weights.iter().map(chosen).sum();
        let rest = weights.iter().map(|spec| spec.numel() as u64).sum::<u64>() - on_device;
        let bytes = ran.summary.per_rank[0].link_bytes;
        let expected = LinkBytes { to_host: times * 2 * rest, to_device: 2 * 2 * rest, moves: 12 * on_device };
        assert_eq!(bytes, expected, "accumulated on the {accumulate}");
    }
}
