use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

use tch::{Kind, Tensor};
use zf_sys::autograd::{HookFn, backward, clear_grad_hook, on_grad_accumulated, on_output_grad};

use crate::leaf;

/// A hook that appends a word to a log.
fn note(log: &Arc<Mutex<Vec<&'static str>>>, word: &'static str) -> HookFn {
    let log = Arc::clone(log);
    Box::new(move || {
        log.lock().unwrap().push(word);
        Ok(())
    })
}

#[test]
fn fires_once_a_backward_also_when_the_parameter_is_used_twice() {
    let x = leaf(&[3], 0.0);
    let log = Arc::default();
    on_grad_accumulated(&x, note(&log, "x")).unwrap();
    for pass in 1..=3 {
        let loss = (&x * &x + x.sin()).sum(Kind::Float);
        backward(&[loss], &[None], false).unwrap();
        assert_eq!(log.lock().unwrap().len(), pass);
    }
}

#[test]
fn a_new_hook_replaces_the_old_and_clear_removes_it() {
    let x = leaf(&[3], 0.0);
    let log = Arc::default();
    let run = || backward(&[x.sum(Kind::Float)], &[None], false).unwrap();
    clear_grad_hook(&x).unwrap();
    on_grad_accumulated(&x, note(&log, "old")).unwrap();
    on_grad_accumulated(&x, note(&log, "new")).unwrap();
    run();
    clear_grad_hook(&x).unwrap();
    run();
    assert_eq!(*log.lock().unwrap(), ["new"]);
    assert_eq!(Arc::strong_count(&log), 1, "removed hooks are dropped");
}

#[test]
fn output_hooks_come_before_the_backward_of_what_made_the_output() {
    let (a, b) = (leaf(&[3], 0.0), leaf(&[3], 0.1));
    let log = Arc::default();
    on_grad_accumulated(&a, note(&log, "a")).unwrap();
    on_grad_accumulated(&b, note(&log, "b")).unwrap();
    let first = &a * 2.0;
    let second = &first * &b;
    on_output_grad(&first, note(&log, "first")).unwrap();
    on_output_grad(&second, note(&log, "second")).unwrap();
    backward(&[second.sum(Kind::Float)], &[None], false).unwrap();
    let log = log.lock().unwrap();
    let place = |word| log.iter().position(|entry| *entry == word).unwrap();
    assert_eq!(log.len(), 4);
    assert!(place("second") < place("b") && place("second") < place("first"), "{log:?}");
    assert!(place("first") < place("a"), "{log:?}");
}

#[test]
fn the_gradient_is_complete_when_the_hook_runs() {
    let x = leaf(&[2], 0.0);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (handle, sink) = (Mutex::new(x.shallow_clone()), Arc::clone(&seen));
    on_grad_accumulated(
        &x,
        Box::new(move || {
            let x = handle.lock().map_err(|error| error.to_string())?;
            sink.lock().unwrap().push(x.grad().double_value(&[0]));
            Ok(())
        }),
    )
    .unwrap();
    for _ in 0..2 {
        backward(&[(&x * 2.0 + &x * 3.0).sum(Kind::Float)], &[None], false).unwrap();
    }
    assert_eq!(*seen.lock().unwrap(), [5.0, 10.0]);
    clear_grad_hook(&x).unwrap();
}

#[test]
fn an_error_or_a_panic_in_a_hook_ends_backward_with_its_message() {
    let x = leaf(&[3], 0.0);
    let run = |hook: HookFn| {
        on_grad_accumulated(&x, hook).unwrap();
        backward(&[x.sum(Kind::Float)], &[None], false).unwrap_err().to_string()
    };
    assert_eq!(run(Box::new(|| Err("link 2 is down".into()))), "autograd::backward: link 2 is down");
    let index = 3;
    assert_eq!(
        run(Box::new(move || panic!("bucket {index} is missing"))),
        "autograd::backward: a callback panicked: bucket 3 is missing"
    );
    on_grad_accumulated(&x, Box::new(|| Ok(()))).unwrap();
    let y = &x * 2.0;
    on_output_grad(&y, Box::new(|| Err("no".into()))).unwrap();
    let error = backward(&[y.sum(Kind::Float)], &[None], false).unwrap_err().to_string();
    assert_eq!(error, "autograd::backward: no");
    // The thread is still good for another pass.
    backward(&[x.sum(Kind::Float)], &[None], false).unwrap();
}

#[test]
fn hooks_that_could_never_run_are_refused() {
    let plain = Tensor::zeros([3], crate::F32);
    assert!(on_grad_accumulated(&plain, Box::new(|| Ok(()))).is_err());
    assert!(on_output_grad(&plain, Box::new(|| Ok(()))).is_err());
    let x = leaf(&[3], 0.0);
    assert!(on_grad_accumulated(&(&x * 2.0), Box::new(|| Ok(()))).is_err());
}

#[test]
fn several_rank_threads_run_hooks_at_once_on_their_own_thread() {
    const RANKS: usize = 4;
    let barrier = Arc::new(Barrier::new(RANKS));
    let fired = Arc::new(AtomicUsize::new(0));
    let ranks: Vec<_> = (0..RANKS)
        .map(|rank| {
            let (barrier, fired) = (Arc::clone(&barrier), Arc::clone(&fired));
            thread::spawn(move || {
                zf_sys::threads::set_operator_threads(1).unwrap();
                let x = leaf(&[8], rank as f64);
                let me = thread::current().id();
                on_grad_accumulated(
                    &x,
                    Box::new(move || {
                        // All ranks meet inside their hooks, as a collective would make them.
                        barrier.wait();
                        fired.fetch_add(1, Ordering::Relaxed);
                        if thread::current().id() == me { Ok(()) } else { Err("on another thread".into()) }
                    }),
                )
                .unwrap();
                for _ in 0..20 {
                    backward(&[x.sin().sum(Kind::Float)], &[None], false).unwrap();
                }
            })
        })
        .collect();
    for rank in ranks {
        rank.join().unwrap();
    }
    assert_eq!(fired.load(Ordering::Relaxed), 20 * RANKS);
}
