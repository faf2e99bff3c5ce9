use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use tch::{Kind, Tensor};
use zf_sys::autograd::{
    CheckpointFn, CheckpointHooks, StepFn, backward, checkpoint, grad, on_grad_accumulated, version,
};
use zf_sys::heap::Heap;

use crate::{F32, assert_same_bits, leaf, values};

fn anchor() -> Tensor {
    Tensor::zeros([1], F32).set_requires_grad(true)
}

/// A tensor inside a closure that must be `Sync`.
fn shared(tensor: &Tensor) -> Mutex<Tensor> {
    Mutex::new(tensor.shallow_clone())
}

fn get(tensor: &Mutex<Tensor>) -> Tensor {
    tensor.lock().unwrap().shallow_clone()
}

/// tanh(x W^T), twice, with two weights.
fn block(w1: &Tensor, w2: &Tensor) -> CheckpointFn {
    let (w1, w2) = (shared(w1), shared(w2));
    Arc::new(move |inputs| {
        let hidden = inputs[0].f_linear(&get(&w1), None::<Tensor>).and_then(|y| y.f_tanh());
        let out = hidden.and_then(|y| y.f_linear(&get(&w2), None::<Tensor>)).and_then(|y| y.f_tanh());
        Ok(vec![out.map_err(|error| error.to_string())?])
    })
}

/// Two blocks in a row; returns output and the gradients of x and all weights.
fn run(recompute: bool, nested: bool) -> Vec<Tensor> {
    let x = leaf(&[6, 16], 0.0);
    let weights: Vec<_> = (0..4).map(|index| leaf(&[16, 16], f64::from(index) * 0.01)).collect();
    let anchor = anchor();
    let (first, second) = (block(&weights[0], &weights[1]), block(&weights[2], &weights[3]));
    let call = |f: &CheckpointFn, input: Tensor, anchor: &Tensor| -> Tensor {
        let outputs = if recompute {
            checkpoint(&[input], anchor, Arc::clone(f), CheckpointHooks::default()).unwrap()
        } else {
            f(&[input]).unwrap()
        };
        outputs.into_iter().next().unwrap()
    };
    let out = if nested {
        let inner_anchor = shared(&anchor);
        let both: CheckpointFn = Arc::new(move |inputs| {
            let anchor = get(&inner_anchor);
            let middle = checkpoint(inputs, &anchor, Arc::clone(&first), CheckpointHooks::default())
                .map_err(|e| e.to_string())?;
            checkpoint(&middle, &anchor, Arc::clone(&second), CheckpointHooks::default()).map_err(|e| e.to_string())
        });
        call(&both, x.shallow_clone(), &anchor)
    } else {
        let middle = call(&first, x.shallow_clone(), &anchor);
        call(&second, middle, &anchor)
    };
    // Twice, so that gradients also accumulate.
    backward(&[out.shallow_clone()], &[Some(values(&[6, 16], 0.7))], true).unwrap();
    backward(&[out.shallow_clone()], &[Some(values(&[6, 16], 0.8))], false).unwrap();
    assert!(grad(&anchor).is_none(), "the anchor never gets a gradient");
    let mut all = vec![out.detach(), grad(&x).unwrap()];
    all.extend(weights.iter().map(|weight| grad(weight).unwrap()));
    all
}

fn compare(plain: &[Tensor], other: &[Tensor]) {
    assert_eq!(plain.len(), other.len());
    for (index, (left, right)) in plain.iter().zip(other).enumerate() {
        assert_same_bits(left, right, &format!("tensor {index}"));
    }
}

#[test]
fn gives_the_same_bits_as_plain_autograd() {
    compare(&run(false, false), &run(true, false));
}

#[test]
fn nests() {
    compare(&run(false, false), &run(true, true));
}

#[test]
fn works_in_several_threads_at_once() {
    zf_sys::threads::set_operator_threads(1).unwrap();
    let ranks: Vec<_> = (0..4)
        .map(|rank| {
            thread::spawn(move || {
                zf_sys::threads::set_operator_threads(1).unwrap();
                (0..5).map(|_| run(true, rank % 2 == 0)).collect::<Vec<_>>()
            })
        })
        .collect();
    let plain = run(false, false);
    for rank in ranks {
        for result in rank.join().unwrap() {
            compare(&plain, &result);
        }
    }
}

#[test]
fn the_anchor_reaches_autograd_when_no_input_needs_a_gradient() {
    // Token ids in, as in an embedding; a parameter that only the closure knows.
    let table = leaf(&[10, 4], 0.0);
    let ids = Tensor::from_slice(&[1_i64, 3, 3]);
    let inside = shared(&table);
    let f: CheckpointFn = Arc::new(move |inputs| {
        assert!(!inputs[1].defined());
        let rows = get(&inside).f_index_select(0, &inputs[0]).map_err(|error| error.to_string())?;
        Ok(vec![rows, inputs[0].shallow_clone()])
    });
    let inputs = [ids.shallow_clone(), Tensor::new()];
    let outputs = checkpoint(&inputs, &anchor(), Arc::clone(&f), CheckpointHooks::default()).unwrap();
    assert!(outputs[0].requires_grad());
    assert!(!outputs[1].requires_grad(), "integer outputs have no gradient");
    assert_eq!(outputs[1], ids);
    backward(&[outputs[0].sum(Kind::Float)], &[None], false).unwrap();
    let rows: Vec<f64> = (0..10).map(|row| grad(&table).unwrap().double_value(&[row, 0])).collect();
    assert_eq!(rows, [0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);

    let unrecorded = checkpoint(&inputs, &Tensor::zeros([1], F32), f, CheckpointHooks::default()).unwrap();
    assert!(unrecorded[0].requires_grad(), "without recording, the block follows the caller's grad mode");
}

#[test]
fn an_input_returned_as_it_is_gets_its_gradient() {
    let x = leaf(&[3], 0.0);
    let f: CheckpointFn = Arc::new(|inputs| Ok(vec![inputs[0].shallow_clone(), &inputs[0] * 2.0]));
    let outputs = checkpoint(&[x.shallow_clone()], &anchor(), f, CheckpointHooks::default()).unwrap();
    backward(&[(&outputs[0] + &outputs[1]).sum(Kind::Float)], &[None], false).unwrap();
    assert_same_bits(&grad(&x).unwrap(), &Tensor::from_slice(&[3.0_f32; 3]), "x");
}

#[test]
fn an_output_that_is_not_used_costs_nothing() {
    let x = leaf(&[3], 0.0);
    let f: CheckpointFn = Arc::new(|inputs| Ok(vec![&inputs[0] * 5.0, &inputs[0] * 2.0]));
    let outputs = checkpoint(&[x.shallow_clone()], &anchor(), f, CheckpointHooks::default()).unwrap();
    backward(&[outputs[1].sum(Kind::Float)], &[None], false).unwrap();
    assert_same_bits(&grad(&x).unwrap(), &Tensor::from_slice(&[2.0_f32; 3]), "x");
}

#[test]
fn only_the_inputs_stay_alive_between_forward_and_backward() {
    let heap = Heap::new("kept").unwrap();
    let _inside = heap.enter();
    let (w1, w2, x) = (leaf(&[64, 64], 0.0), leaf(&[64, 64], 0.1), values(&[128, 64], 0.2));
    let f = block(&w1, &w2);
    let anchor = anchor();
    let before = heap.stats().live.total();
    let plain = f(&[x.shallow_clone()]).unwrap();
    assert!(heap.stats().live.total() - before >= 2 * 128 * 64 * 4, "plain autograd keeps the inner results");
    drop(plain);
    assert_eq!(heap.stats().live.total(), before);
    let outputs = checkpoint(&[x.shallow_clone()], &anchor, f, CheckpointHooks::default()).unwrap();
    assert_eq!(heap.stats().live.total() - before, 128 * 64 * 4, "only the output is new");
    drop(outputs);
    assert_eq!(heap.stats().live.total(), before);
}

#[test]
fn hooks_run_in_their_order_and_the_stash_is_released() {
    let log: Arc<Mutex<Vec<&'static str>>> = Arc::default();
    let note = |word: &'static str| -> StepFn {
        let log = Arc::clone(&log);
        Arc::new(move || {
            log.lock().unwrap().push(word);
            Ok(())
        })
    };
    let held = Arc::new(());
    let (on_stash, on_fetch, on_run, token) = (note("stash"), note("fetch"), note("run"), Arc::clone(&held));
    let hooks = CheckpointHooks {
        stash: Some(Arc::new(move |inputs: Vec<Tensor>| {
            on_stash()?;
            // To 64 bits and back, as a stand-in for another tier.
            let away: Vec<_> = inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
            let (on_fetch, token) = (Arc::clone(&on_fetch), Arc::clone(&token));
            Ok(Box::new(move || {
                let _held = &token;
                on_fetch()?;
                Ok(away.iter().map(|input| input.to_kind(Kind::Float)).collect())
            }))
        })),
        before_backward: Some(note("begin")),
        after_backward: Some(note("end")),
    };
    let (x, w) = (leaf(&[4, 4], 0.0), leaf(&[4, 4], 0.1));
    let on_grad = note("grad");
    on_grad_accumulated(&w, Box::new(move || on_grad())).unwrap();
    let inside = shared(&w);
    let f: CheckpointFn = Arc::new(move |inputs| {
        on_run()?;
        Ok(vec![inputs[0].matmul(&get(&inside))])
    });
    let outputs = checkpoint(&[x.shallow_clone()], &anchor(), f, hooks).unwrap();
    assert_eq!(*log.lock().unwrap(), ["stash", "run"]);
    assert_eq!(Arc::strong_count(&held), 3);
    backward(&[outputs[0].sum(Kind::Float)], &[None], false).unwrap();
    assert_eq!(*log.lock().unwrap(), ["stash", "run", "begin", "fetch", "run", "grad", "end"]);
    assert_eq!(Arc::strong_count(&held), 2, "the fetch closure goes when the graph is released, before the node");
    let expected = Tensor::ones([4, 4], F32).matmul(&w.detach().tr());
    assert_same_bits(&grad(&x).unwrap(), &expected, "x");
    drop(outputs);
    assert_eq!(Arc::strong_count(&held), 1);
}

#[test]
fn errors_and_panics_surface_from_forward_and_from_backward() {
    let x = leaf(&[3], 0.0);
    let fail: CheckpointFn = Arc::new(|_| Err("unit 4 is not gathered".into()));
    let error = checkpoint(&[x.shallow_clone()], &anchor(), fail, CheckpointHooks::default()).unwrap_err();
    assert_eq!(error.to_string(), "autograd::checkpoint: unit 4 is not gathered");

    // The second call is the one in backward.
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    let late: CheckpointFn = Arc::new(move |inputs| {
        assert_eq!(counter.fetch_add(1, Ordering::Relaxed), 0, "no second time");
        Ok(vec![&inputs[0] * 2.0])
    });
    let outputs = checkpoint(&[x.shallow_clone()], &anchor(), late, CheckpointHooks::default()).unwrap();
    let error = backward(&[outputs[0].sum(Kind::Float)], &[None], false).unwrap_err().to_string();
    assert!(error.contains("a callback panicked") && error.contains("no second time"), "{error}");
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    // A failed pass leaves the engine usable.
    backward(&[x.sum(Kind::Float)], &[None], false).unwrap();
}

#[test]
fn a_second_backward_without_retain_and_a_changed_input_are_refused() {
    let x = leaf(&[3], 0.0);
    let f: CheckpointFn = Arc::new(|inputs| Ok(vec![inputs[0].sin()]));
    let outputs = checkpoint(&[x.shallow_clone()], &anchor(), Arc::clone(&f), CheckpointHooks::default()).unwrap();
    let loss = outputs[0].sum(Kind::Float);
    backward(&[loss.shallow_clone()], &[None], false).unwrap();
    let error = backward(&[loss], &[None], false).unwrap_err().to_string();
    assert!(error.contains("second time"), "{error}");

    let mut input = &x * 1.0;
    let outputs = checkpoint(&[input.shallow_clone()], &anchor(), f, CheckpointHooks::default()).unwrap();
    let before = version(&input).unwrap();
    let _ = input.g_mul_scalar_(2.0);
    assert_eq!(version(&input).unwrap(), before + 1);
    let error = backward(&[outputs[0].sum(Kind::Float)], &[None], false).unwrap_err().to_string();
    assert!(error.contains("inplace"), "{error}");
}
