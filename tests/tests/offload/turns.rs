//! What happens between steps, in the middle of windows: evaluation, a look at a parameter, other stages.

use tch::{Device, Kind};
use zf_core::data::{BatchPlan, Order, OrderKind, Split, assemble};
use zf_core::layout::DType;
use zf_core::stage::AccumulateOn;

use super::{Zenflow, drained, host};
use crate::lab::{Bench, Lab, bits, of};

const STEPS: usize = 7;

fn tiny(dtype: DType) -> Lab {
    Lab::tiny("tiny-llama").with(|lab| {
        (lab.global, lab.micro) = (1, 1);
        lab.options.dtype = dtype;
    })
}

fn settings() -> [Zenflow; 3] {
    let on_device = |zenflow: &mut Zenflow| zenflow.config.accumulate = AccumulateOn::Device;
    [Zenflow::new(0.2, 3, 3), Zenflow::new(0.2, 2, 4).late().with(on_device), Zenflow::new(0.2, 3, 3).synchronous()]
}

/// The loss on the batch of the next step.
fn ahead(bench: &mut Bench<'_>, lab: &Lab) -> zf_core::Result<f64> {
    let order = Order::new(lab.dataset.len(Split::Train), 1, OrderKind::Sequential);
    let turns = BatchPlan::new(lab.global, lab.micro, 1, true)?.turns(bench.engine.steps(), 0);
    let (loss, tokens) = bench.engine.evaluate(&mut |turn| match turn {
        0 => assemble(&*lab.dataset, &order, Split::Train, &turns[0], Device::Cpu).map(Some),
        _ => Ok(None),
    })?;
    Ok(loss / tokens as f64)
}

/// Evaluation sees what the next step sees, drains nothing and changes nothing.
#[test]
fn evaluation_in_the_middle_of_a_window() {
    for zenflow in settings() {
        for stage in [0, 3] {
            let lab = zenflow.of(&tiny(DType::Bfloat16)).on(1, stage);
            let known = drained(&lab, STEPS);
            let looked = lab.run(|mut bench| {
                let mut reports = Vec::new();
                for _ in 0..STEPS {
                    let loss = ahead(&mut bench, &lab)?;
                    reports.push(bench.step()?);
                    assert_eq!(loss, reports[reports.len() - 1].loss, "step {}", reports.len() - 1);
                }
                bench.engine.drain()?;
                Ok((bits(&reports), bench.engine.state_hash()?))
            });
            assert_eq!(looked.expect("runs"), [(bits(&known.0), known.1)]);
        }
    }
}

/// A parameter is what forward sees: its master rounded, once everything is visible.
#[test]
fn a_look_at_parameters() {
    for dtype in [DType::Float32, DType::Bfloat16] {
        for zenflow in settings() {
            let lab = zenflow.of(&tiny(dtype)).on(2, 3).with(|lab| lab.global = 2);
            let known = drained(&lab, STEPS);
            let looked = lab.run(|mut bench| {
                let names: Vec<String> =
                    lab.model.units().iter().flat_map(|unit| &unit.params).map(|spec| spec.name.clone()).collect();
                for _ in 0..STEPS {
                    bench.step()?;
                    for name in &names {
                        let _ = bench.engine.parameter(name)?;
                    }
                }
                bench.engine.drain()?;
                let masters = bench.masters()?;
                for name in &names {
                    let seen = bench.engine.parameter(name)?.to_kind(Kind::Float).view([-1]);
                    let expected =
                        tch::Tensor::from_slice(of(&masters, name)).to_kind(dtype.kind()).to_kind(Kind::Float);
                    assert!(seen == expected, "{dtype:?}: {name}");
                }
                bench.engine.state_hash()
            });
            assert!(looked.expect("runs").iter().all(|hash| *hash == known.1), "{dtype:?}: looking changes nothing");
        }
    }
}

/// Other stages at two moments in the middle of windows: the bits do not depend on which.
#[test]
fn other_stages_in_the_middle_of_a_window() {
    for zenflow in settings() {
        let lab = zenflow.of(&tiny(DType::Bfloat16)).on(2, 1).with(|lab| lab.global = 2);
        let through = |first: u8, stages: [u8; 2]| {
            let ran = lab.on(2, first).run(|mut bench| {
                let mut reports = Vec::new();
                for stage in stages {
                    for _ in 0..4 {
                        reports.push(bench.step()?);
                    }
                    bench.engine = bench.engine.rebuild(lab.stages(stage))?;
                }
                for _ in 0..4 {
                    reports.push(bench.step()?);
                }
                bench.engine.drain()?;
                Ok((bits(&reports), bench.engine.state_hash()?))
            });
            ran.unwrap_or_else(|error| panic!("{first} {stages:?}: {error}")).remove(0)
        };
        let known = through(1, [1, 1]);
        for (first, stages) in [(0, [3, 1]), (3, [2, 0]), (2, [2, 3])] {
            assert_eq!(through(first, stages), known, "stage {first}, then {stages:?}");
        }
    }
}

/// From device to host, to ZenFlow and back: what is synchronous is AdamW all the way.
#[test]
fn other_offloads_in_mid_run() {
    let plain = tiny(DType::Bfloat16).on(2, 1).with(|lab| lab.global = 2);
    let known = drained(&plain, 8);
    let offloads = [
        host(&plain, |_| {}),
        Zenflow::new(1.0, 4, 4).of(&plain),
        Zenflow::new(0.3, 1, 1).synchronous().of(&plain),
        plain.clone(),
    ];
    let ran = plain.run(|mut bench| {
        let mut reports = Vec::new();
        for lab in &offloads {
            reports.push(bench.step()?);
            reports.push(bench.step()?);
            let before = bench.engine.state_hash()?;
            bench.engine = bench.engine.rebuild(lab.own_stages())?;
            assert_eq!(bench.engine.state_hash()?, before, "moved state");
        }
        Ok((bits(&reports), bench.engine.state_hash()?))
    });
    for found in ran.expect("runs") {
        assert_eq!(found, (bits(&known.0), known.1.clone()));
    }
}
