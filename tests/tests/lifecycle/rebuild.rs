//! Other stages in mid-run: the state moves, and the bits stay.

use zf_core::Result;
use zf_core::layout::DType;
use zf_sys::heap::Category;

use crate::lab::{Lab, bits};

fn check(dtype: DType, ranks: usize) {
    let lab = Lab::tiny("tiny-llama").on(ranks, 0).with(|lab| {
        lab.options.dtype = dtype;
        lab.options.clip = 1.0;
        lab.options.loss_scale.initial = 256.0;
        lab.options.loss_scale.window = 2;
    });
    let (reports, hash) = lab.steps(6);
    let changed = lab.run(|mut bench| {
        let mut seen = Vec::new();
        for stage in [1, 0, 0] {
            seen.push(bench.step()?);
            seen.push(bench.step()?);
            let before = bench.engine.state_hash()?;
            bench.engine = bench.engine.rebuild(lab.stages(stage))?;
            assert_eq!(bench.engine.state_hash()?, before, "moved state");
            assert_eq!(bench.engine.steps(), seen.len() as u64);
        }
        Ok((seen, bench.engine.state_hash()?))
    });
    for (seen, found) in changed.expect("runs") {
        assert_eq!(bits(&seen), bits(&reports), "{dtype:?} N={ranks}");
        assert_eq!(found, hash, "{dtype:?} N={ranks}: state");
    }
}

#[test]
fn stage_0_1_0_is_stage_0() {
    for ranks in [1, 2, 3] {
        check(DType::Float32, ranks);
    }
    check(DType::Bfloat16, 3);
    check(DType::Float16, 2);
}

/// The memory of the old stages is given back.
#[test]
fn memory_follows_the_stages() {
    let lab = Lab::tiny("tiny-llama").on(2, 0).with(|lab| lab.options.exact = false);
    let sizes = lab.run(|mut bench| {
        let held = |bench: &crate::lab::Bench<'_>| bench.heap.stats().live[Category::Optimizer];
        bench.step()?;
        let dense = held(&bench);
        bench.engine = bench.engine.rebuild(lab.stages(1))?;
        bench.step()?;
        let sharded = held(&bench);
        bench.engine = bench.engine.rebuild(lab.stages(0))?;
        bench.step()?;
        Ok([dense, sharded, held(&bench)])
    });
    for [dense, sharded, again] in sizes.expect("runs") {
        assert_eq!(dense, 2 * sharded);
        assert_eq!(dense, again);
    }
}

/// Another rule keeps masters and counts; states that it does not share start at zero.
#[test]
fn another_rule_starts_its_own_states() -> Result<()> {
    let lab = Lab::tiny("tiny-llama").on(2, 1);
    let results = lab.run(|mut bench| {
        bench.step()?;
        let before = bench.masters()?;
        let stages = lab.with(|lab| lab.optimizer = crate::lab::descent(0.1)).stages(1);
        bench.engine = bench.engine.rebuild(stages)?;
        let moved = bench.masters()?;
        let report = bench.step()?;
        Ok(before == moved && !report.skipped && bench.engine.updates() == 2)
    })?;
    assert_eq!(results, [true, true]);
    Ok(())
}
