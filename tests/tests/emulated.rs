//! Emulated devices: the same training in memory of a fixed size, and what a run says when that is not enough.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};
use zf_core::config::DeviceKind;
use zf_core::device::OutOfMemory;
use zf_core::model::{Batch, Context, LossSum, Model, UnitSpec};
use zf_core::train::Silent;
use zf_core::{Error, Result};
use zf_sys::heap::Category;
use zf_tests::{Ran, tiny, train, training};

/// A few steps of a tiny model on two ranks, with more keys.
fn keys(more: &str) -> String {
    let keys = "run.steps = 3\nrun.global_batch = 8\nrun.micro_batch = 2\nrun.exact = true\ntransport.ranks = 2\n\
                partition.stage = 1\n";
    tiny("tiny-llama", &format!("{keys}{more}"))
}

fn emulated(bytes: u64) -> String {
    format!("device = {{ kind = \"emulated\", memory = {bytes} }}\n")
}

/// The highest peak over ranks and time.
fn peak(ran: &Ran) -> u64 {
    ran.summary.per_rank.iter().map(|rank| rank.memory.device_peak).max().expect("ranks")
}

/// The rank, step and cause of a run that must run out of memory, with its whole message.
fn full(text: &str, change: impl FnOnce(&mut zf_core::train::Training)) -> (u64, OutOfMemory, String) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut training = training(text, folder.path());
    change(&mut training);
    let error = training.run(&mut Silent).expect_err("the device is too small");
    assert_eq!(error.exit_code(), 1);
    let message = error.to_string();
    let Error::At { step, source, .. } = error else { panic!("{message}") };
    let Error::OutOfMemory(found) = *source else { panic!("{message}") };
    (step, *found, message)
}

#[test]
fn a_device_that_is_large_enough_gives_the_same_bits_and_one_that_is_not_says_why() {
    let free = train(&keys("device.kind = \"cpu\"\n"));
    let needed = peak(&free);

    // Headers, rounding and gaps come on top of what tensors ask for.
    let limit = needed * 3 / 2;
    let fixed = train(&keys(&emulated(limit)));
    assert_eq!(fixed.losses(), free.losses());
    assert_eq!(fixed.norms(), free.norms());
    assert_eq!(fixed.summary.state_hash, free.summary.state_hash);
    assert!(peak(&fixed) <= limit);
    assert_eq!(peak(&fixed), needed, "the same tensors");

    let limit = needed * 4 / 5;
    let (step, found, message) = full(&keys(&emulated(limit)), |_| {});
    assert_eq!(step, 0);
    for part in
        ["rank 0, step 0: ", "is out of memory: ", " MiB wanted for ", "\n  live: ", "parameters ", "\n  free: "]
    {
        assert!(message.contains(part), "{part:?} is missing in {message}");
    }
    assert!(message.contains(", the largest block ") && message.contains("`device.memory`"), "{message}");
    let refusal = &found.refusal;
    assert_eq!(refusal.room.size.unsigned_abs(), limit / 64 * 64);
    assert!(refusal.live.total() <= refusal.room.size && refusal.live[Category::Parameters] > 0);
    assert!(refusal.asked > refusal.room.largest_free);
    assert!(matches!(refusal.phase, Some("forward" | "backward" | "norm" | "update")), "{message}");

    // The failed run gave everything back.
    let again = train(&keys(&emulated(needed * 3 / 2)));
    assert_eq!(again.summary.state_hash, free.summary.state_hash);
}

#[test]
fn a_model_that_does_not_fit_is_told_at_the_start() {
    let (step, found, message) = full(&keys(&emulated(256 << 10)), |_| {});
    assert_eq!((step, found.refusal.phase), (0, Some("start")), "{message}");
    assert!(message.contains(" in start\n"), "{message}");
    assert!(!found.advice.is_empty(), "{message}");
}

#[test]
fn advice_follows_what_the_run_uses() {
    // Nearly everything is optimizer state, which one rank cannot split.
    let text = keys(&emulated(256 << 10)).replace("transport.ranks = 2", "transport.ranks = 1");
    let (_, found, message) = full(&text, |_| {});
    assert!(found.advice.iter().any(|line| line.contains("several ranks")), "{message}");
    // Two ranks that could.
    let text = keys(&emulated(256 << 10)).replace("partition.stage = 1", "partition.stage = 0");
    let (_, found, message) = full(&text, |_| {});
    assert!(found.advice.iter().all(|line| !line.contains("several ranks")), "{message}");
}

/// Runs another model, then asks on rank 1 for more than there is, as plugins do it.
struct Greedy(Arc<dyn Model>, fn() -> Result<()>);

impl Model for Greedy {
    fn units(&self) -> Vec<UnitSpec> {
        self.0.units()
    }

    fn loss(&self, cx: &dyn Context, batch: &Batch) -> anyhow::Result<LossSum> {
        let loss = self.0.loss(cx, batch)?;
        if std::thread::current().name() == Some("rank-1") {
            (self.1)()?;
        }
        Ok(loss)
    }

    fn vocabulary(&self) -> usize {
        self.0.vocabulary()
    }
}

const BYTE: (Kind, Device) = (Kind::Uint8, Device::Cpu);

fn panics() -> Result<()> {
    let _ = Tensor::empty([1 << 30], BYTE);
    Ok(())
}

fn fails() -> Result<()> {
    let _ = Tensor::f_empty([1 << 30], BYTE)?;
    Ok(())
}

#[test]
fn one_full_rank_ends_the_run_with_its_own_error_also_from_a_panic() {
    for greedy in [panics, fails] {
        let (_, found, message) = full(&keys(&emulated(64 << 20)), |training| {
            training.model.model = Arc::new(Greedy(training.model.model.clone(), greedy));
        });
        assert!(message.starts_with("rank 1, step 0: "), "{message}");
        assert_eq!((found.refusal.asked, found.refusal.phase), (1 << 30, Some("forward")), "{message}");
        assert_eq!(found.refusal.category, Category::Activations);
    }
}

#[test]
fn size_and_kind_go_together_for_programs_too() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut training = training(&keys(""), folder.path());
    training.device.kind = DeviceKind::Emulated;
    let error = training.run(&mut Silent).expect_err("no size");
    assert!(error.to_string().contains("`device.memory`"), "{error}");
    assert_eq!(error.exit_code(), 2);
}
