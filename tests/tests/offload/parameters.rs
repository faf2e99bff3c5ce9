//! Parameters in host memory (`offload.parameters = "host"`): the same bits, with a few units on the device at a time.

use zf_core::layout::DType;
use zf_core::stage::ParametersOn;
use zf_core::train::Silent;
use zf_sys::heap::Category;

use super::equal::tiny;
use super::{drained, expect, host};
use crate::lab::{Lab, bits};

const STEPS: usize = 5;

/// ZeRO-Offload with parameters in host memory.
fn far(lab: &Lab) -> Lab {
    host(lab, |config| config.parameters = ParametersOn::Host)
}

/// Whatever the model, the type, the sharding, and how far ahead units are fetched.
#[test]
fn where_parameters_lie_changes_no_bit() {
    for (model, dtype) in
        [("tiny-llama", DType::Float32), ("tiny-gpt2", DType::Bfloat16), ("tiny-llama", DType::Float16)]
    {
        let plain = tiny(model, dtype);
        let known = drained(&plain, STEPS);
        for (ranks, stage) in [(1, 0), (1, 3), (2, 0), (2, 3), (4, 3)] {
            expect(&format!("{model} {dtype:?}"), &known, &far(&plain.on(ranks, stage)), STEPS);
        }
        let ahead = far(&plain.on(2, 3)).with(|lab| (lab.zero.prefetch, lab.zero.max_live_units) = (2, 4));
        expect(&format!("{model} {dtype:?}, two units ahead"), &known, &ahead, STEPS);
    }
}

/// From the device to the host and back in mid-run; a look at parameters on the way.
#[test]
fn parameters_move_in_mid_run() {
    let plain = tiny("tiny-gpt2", DType::Bfloat16).on(2, 3);
    let known = drained(&plain, 6);
    let next = [far(&plain), host(&plain, |_| {}), far(&plain).on(2, 0)];
    let ran = plain.run(|mut bench| {
        let mut reports = Vec::new();
        for lab in &next {
            reports.push(bench.step()?);
            reports.push(bench.step()?);
            let unit = &plain.model.units()[0].params[0].name;
            let before =
                (bench.engine.state_hash()?, Vec::<f32>::try_from(bench.engine.parameter(unit)?.flatten(0, -1)));
            bench.engine = bench.engine.rebuild(lab.own_stages())?;
            let after =
                (bench.engine.state_hash()?, Vec::<f32>::try_from(bench.engine.parameter(unit)?.flatten(0, -1)));
            assert_eq!(after.0, before.0, "moved state");
            assert_eq!(after.1.expect("numbers"), before.1.expect("numbers"), "{unit}");
        }
        Ok((bits(&reports), bench.engine.state_hash()?))
    });
    for found in ran.expect("runs") {
        assert_eq!(found, (bits(&known.0), known.1.clone()));
    }
}

/// Parameters of a unit cross the link before each of its passes, gradients once a step, and nothing else does.
#[test]
fn the_link_carries_each_unit_twice() {
    for (ranks, stage) in [(1, 0), (2, 3)] {
        let lab = far(&tiny("tiny-llama", DType::Bfloat16).on(ranks, stage)).with(|lab| lab.options.exact = false);
        let carried = lab.run(|mut bench| {
            for _ in 0..STEPS {
                bench.step()?;
            }
            let (layout, traffic) = (bench.engine.layout(), bench.engine.link_traffic());
            let (mut kept, mut owned) = (0, 0);
            for flat in &layout.flats {
                let passes = if layout.units[flat.unit].root { 1 } else { 2 };
                kept += passes * 2 * flat.numel / flat.params.group();
                owned += 2 * flat.numel / flat.optim.group();
            }
            let turns = lab.global / lab.micro / ranks;
            assert_eq!(traffic.to_device, (STEPS * turns * kept) as u64, "{}", lab.case());
            assert_eq!(traffic.to_host, (STEPS * owned) as u64, "{}", lab.case());
            Ok(traffic.moves)
        });
        assert_eq!(carried.expect("runs"), vec![0; ranks]);
    }
}

/// Between steps the device holds no parameters, and the host those of this rank.
#[test]
fn the_device_keeps_none() {
    for (ranks, stage) in [(1, 0), (2, 3)] {
        let plain = tiny("tiny-llama", DType::Bfloat16).on(ranks, stage);
        let live = |lab: &Lab| {
            let seen = lab.run(|mut bench| {
                bench.step()?;
                let _ = bench.engine.state_hash()?;
                let host = bench.engine.host_heap().map(|heap| heap.stats()).unwrap_or_default();
                Ok((bench.heap.stats().live[Category::Parameters], host.live[Category::Parameters]))
            });
            seen.expect("runs")
        };
        let (here, there) = (live(&host(&plain, |_| {})), live(&far(&plain)));
        for ((device, host), (none, moved)) in here.into_iter().zip(there) {
            assert_eq!((host, none, moved), (0, 0, device), "{}", plain.case());
            assert!(device > 0, "{}", plain.case());
        }
    }
}

/// A model of which the device cannot hold the parameters trains all the same, to the same losses.
#[test]
fn what_does_not_fit_trains() {
    let text = |rest: &str| {
        format!(
            "model = {{ arch = \"llama\", vocab_size = 256, hidden_size = 128, intermediate_size = 256, num_hidden_layers = 10, \
             num_attention_heads = 4, num_key_value_heads = 4, max_position_embeddings = 32, rope_theta = 1e4, \
             rms_norm_eps = 1e-5, tie_word_embeddings = false }}\n\
             data = {{ path = {:?}, sequence_length = 16 }}\nrun.steps = 3\nrun.global_batch = 2\nrun.micro_batch = 2\n\
             run.dtype = \"bfloat16\"\nrun.checkpoint = {{ every = 0, best = false }}\noptim.kind = \"adamw\"\n\
             log.tensorboard = false\nlog.trace = false\n{rest}",
            zf_tests::golden("tokens.bin")
        )
    };
    let offload = |parameters: &str, memory: &str| {
        text(&format!(
            "offload = {{ kind = \"host\", parameters = \"{parameters}\", buffer = \"64KiB\", buffers = 2 }}\n\
             device = {{ kind = \"emulated\", memory = \"{memory}\" }}\n"
        ))
    };
    let losses = |text: &str| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        zf_tests::training(text, folder.path()).run(&mut Silent).map(|_| {
            let records = zf_core::record::read_metrics(&folder.path().join(zf_core::record::METRICS));
            records.expect("a run leaves metrics").iter().map(|record| record.loss.to_bits()).collect::<Vec<_>>()
        })
    };
    let known = losses(&offload("device", "64MiB")).expect("there is room");
    let error = losses(&offload("device", "4MiB")).expect_err("parameters alone are 3.3 MB").to_string();
    assert!(error.contains("memory"), "{error}");
    assert_eq!(losses(&offload("host", "4MiB")).expect("a few units fit"), known);
}

/// Updated parameters would have to go from host to host.
#[test]
fn states_and_parameters_are_split_alike() {
    for stage in [1, 2] {
        let error =
            far(&tiny("tiny-llama", DType::Float32).on(2, stage)).run(|_| Ok(())).expect_err("refused").to_string();
        assert!(error.contains("offload.parameters") && error.contains("partition.stage = 3"), "{error}");
    }
}
