//! Bytes that device and host hold, by libtorch's own allocator, against the costs of ZenFlow.

use zf_core::bytes::ByteSize;
use zf_core::layout::DType;
use zf_core::stage::AccumulateOn;
use zf_select::capacity;
use zf_sys::heap::Category;

use super::{Zenflow, host};
use crate::lab::Lab;

const RATIO: f64 = 0.25;
const BUFFER: u64 = 1 << 10;
const BUFFERS: usize = 2;

/// What one rank holds in the middle of a window, the third one.
#[derive(Debug, Clone, Copy)]
struct Held {
    parameters: i64,
    gradients: i64,
    optimizer: i64,
    buffers: i64,
    host_live: i64,
    host_peak: i64,
}

fn held(lab: &Lab) -> Vec<Held> {
    let seen = lab.run(|mut bench| {
        for _ in 0..5 {
            bench.step()?;
            // Waits for what is on its way.
            let _ = bench.engine.state_hash()?;
        }
        let live = bench.heap.stats().live;
        let host = bench.engine.host_heap().map(|heap| heap.stats()).unwrap_or_default();
        Ok(Held {
            parameters: live[Category::Parameters],
            gradients: live[Category::Gradients],
            optimizer: live[Category::Optimizer],
            buffers: live[Category::Buffers],
            host_live: host.live.total(),
            host_peak: host.peak,
        })
    });
    seen.unwrap_or_else(|error| panic!("{}: {error}", lab.case()))
}

fn sum(held: &[Held], of: impl Fn(&Held) -> i64) -> i64 {
    held.iter().map(of).sum()
}

/// bfloat16, one micro-batch a rank.
fn tiny() -> Lab {
    Lab::tiny("tiny-llama").with(|lab| {
        lab.options.dtype = DType::Bfloat16;
        lab.options.exact = false;
        (lab.global, lab.micro) = (12, 1);
    })
}

/// All elements, and those that are on the device with their states: chosen columns, and parameters without columns.
fn elements(lab: &Lab) -> [i64; 2] {
    let (mut all, mut here) = (0, 0);
    for spec in lab.model.units().iter().flat_map(|unit| &unit.params) {
        let numel = spec.numel();
        all += numel;
        here += match spec.input_dim {
            Some(dim) => {
                let columns = usize::try_from(spec.shape[dim]).expect("not negative");
                capacity(RATIO, columns) * (numel / columns)
            }
            None => numel,
        };
    }
    [all, here].map(|elements| i64::try_from(elements).expect("small"))
}

fn zenflow(accumulate: AccumulateOn) -> Zenflow {
    Zenflow::new(RATIO, 2, 2).with(|zenflow| {
        zenflow.config.accumulate = accumulate;
        (zenflow.config.buffer, zenflow.config.buffers) = (ByteSize(BUFFER), BUFFERS);
    })
}

/// 2 + 12 k bytes a parameter over all ranks, and 4 (1 - k) more for sums on the device; staging buffers are constant.
#[test]
fn the_device_holds_parameters_and_chosen_columns() {
    for (ranks, stage) in [(1, 0), (1, 1), (2, 1), (2, 2), (3, 3), (4, 2)] {
        let lab = tiny().on(ranks, stage);
        let [all, here] = elements(&lab);
        let padding = i64::try_from(16 * ranks * 8).expect("small");
        let (n, copies) = (i64::try_from(ranks).expect("small"), if stage == 3 { 1 } else { ranks as i64 });
        let plain = held(&lab);
        let on_host = held(&zenflow(AccumulateOn::Host).of(&lab));
        let parameters = sum(&on_host, |held| held.parameters);
        assert!(
            (2 * all * copies..=2 * (all + padding) * copies).contains(&parameters),
            "{parameters} {all} {}",
            lab.case()
        );
        assert_eq!(sum(&on_host, |held| held.optimizer), 12 * here, "{}", lab.case());
        let most = n * (BUFFERS as i64) * 2 * BUFFER as i64;
        let more = sum(&on_host, |held| held.buffers) - sum(&plain, |held| held.buffers);
        assert_eq!(more, most, "{}: staging and landing", lab.case());

        let on_device = held(&zenflow(AccumulateOn::Device).of(&lab));
        assert_eq!(sum(&on_device, |held| held.optimizer), 12 * here, "{}", lab.case());
        let more = sum(&on_device, |held| held.gradients) - sum(&on_host, |held| held.gradients);
        assert_eq!(more, 4 * (all - here), "{}: sums", lab.case());
    }
}

/// At most 26 bytes a parameter over all ranks with sums on the host, 18 with sums on the device, and constant buffers.
#[test]
fn the_host_holds_what_the_formula_allows() {
    for (accumulate, bytes) in [(AccumulateOn::Host, 26), (AccumulateOn::Device, 18)] {
        for (ranks, stage) in [(1, 0), (2, 1), (4, 2), (3, 3)] {
            let lab = zenflow(accumulate).of(&tiny().on(ranks, stage));
            let [all, here] = elements(&lab);
            let seen = held(&lab);
            let constant = i64::try_from(ranks * 4 * BUFFERS).expect("small") * BUFFER as i64;
            let (live, peak) = (sum(&seen, |held| held.host_live), sum(&seen, |held| held.host_peak));
            assert!(live >= 12 * (all - here), "{live} bytes cannot hold the states of {}", all - here);
            assert!(live <= bytes * all + constant, "{accumulate:?} {}: {live} live for {all}", lab.case());
            // Columns on their way come on top: a copy of the states of those that go up, and of those that come down.
            let most = bytes * all + 2 * 12 * here + constant;
            assert!(peak <= most, "{accumulate:?} {}: {peak} at the peak for {all}", lab.case());
        }
    }
}

/// ZeRO-Offload leaves parameters alone on the device.
#[test]
fn zero_offload_leaves_no_states() {
    for (ranks, stage) in [(1, 0), (2, 1), (2, 3)] {
        let lab = host(&tiny().on(ranks, stage), |config| {
            (config.buffer, config.buffers) = (ByteSize(BUFFER), BUFFERS);
        });
        let [all, _] = elements(&lab);
        let seen = held(&lab);
        assert_eq!(sum(&seen, |held| held.optimizer), 0, "{}", lab.case());
        let constant = i64::try_from(ranks * 4 * BUFFERS).expect("small") * BUFFER as i64;
        let peak = sum(&seen, |held| held.host_peak);
        assert!((12 * all..=26 * all + constant).contains(&peak), "{}: {peak} for {all}", lab.case());
    }
}
