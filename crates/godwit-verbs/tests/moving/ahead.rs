//! Objects made ahead of a move while applications work.

use godwit_verbs::abi::*;
use godwit_verbs::shim;
use godwit_verbs::tables::RemoteKey;

use crate::attached::held;
use crate::device::{arrive, complete_sends, with};
use crate::{Application, suspend_and_release};

/// Returns the numbers in use at the device.
fn numbers() -> Vec<u32> {
    with(|device| device.numbers.iter().copied().collect())
}

#[test]
fn a_partner_works_on_until_it_changes_over_to_what_was_prepared() {
    let application = Application::start();
    let only = [application.number()];
    assert_eq!([1, 2].map(|wr_id| application.receive(wr_id)), [0, 0]);
    let prepared = shim::prepare(&[application.connection()]).unwrap();
    let [waiting] = prepared[..] else {
        panic!("{prepared:?}")
    };
    assert_eq!(waiting.number, only[0]);
    assert_ne!(waiting.physical, only[0]);
    assert!(
        shim::prepare(&[application.connection()])
            .unwrap_err()
            .contains("prepared for it already")
    );
    // The old queue pair works.
    assert_eq!(application.send(10), 0);
    assert_eq!(
        with(|device| device.sends.keys().copied().collect::<Vec<_>>()),
        only
    );
    complete_sends();
    arrive(only[0]);
    assert_eq!(application.poll(), [10, 1]);
    assert!(
        shim::switch(&only, &[])
            .unwrap_err()
            .contains("not suspended")
    );
    shim::suspend(Some(&only)).unwrap();
    assert!(
        shim::switch(&only, &[])
            .unwrap_err()
            .contains("not been waited for")
    );
    assert_eq!(application.send(11), 0);
    complete_sends();
    application.wait(1).unwrap();
    with(|device| device.changes = 0);
    shim::switch(&only, &[RemoteKey::Region(5, 6)]).unwrap();
    assert_eq!(
        with(|device| device.changes),
        0,
        "a state is changed while the application waits"
    );
    shim::resume(Some(&only)).unwrap();
    let posted = with(|device| device.receives[&waiting.physical].clone());
    assert_eq!(posted, [2]);
    complete_sends();
    arrive(waiting.physical);
    assert_eq!(application.poll(), [11, 2]);
    assert_eq!(numbers(), [only[0], waiting.physical]);
    shim::tidy().unwrap();
    assert_eq!(numbers(), [waiting.physical]);
    assert_eq!(application.send(12), 0);
    complete_sends();
    assert_eq!(application.poll(), [12]);
}

#[test]
fn what_was_prepared_goes_when_it_is_not_wanted() {
    let mut application = Application::start();
    let only = [application.number()];
    let connection = application.connection();
    let prepare = || shim::prepare(std::slice::from_ref(&connection)).unwrap();
    prepare();
    shim::abandon(Some(&only));
    assert_eq!(numbers(), only);
    // The prepared queue pair fits a state that the application has left.
    prepare();
    assert_eq!(application.change(IBV_QPS_RTS), 0);
    assert_eq!(numbers(), only);
    // A queue pair that cannot be prepared takes the others with it.
    let mut unknown = application.connection();
    unknown.number = 77;
    assert!(
        shim::prepare(&[application.connection(), unknown])
            .unwrap_err()
            .contains("queue pair 77")
    );
    assert_eq!(numbers(), only);
    // A process that moves itself leaves no prepared queue pair.
    prepare();
    suspend_and_release(&application, 0);
    assert_eq!(numbers(), [0u32; 0]);
    assert!(
        shim::prepare(&[application.connection()])
            .unwrap_err()
            .contains("being moved itself")
    );
    shim::recreate(None).unwrap();
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    // The end of the queue pair is the end of both.
    prepare();
    assert_eq!(numbers().len(), 2);
    // SAFETY: nothing uses the pair any more.
    assert_eq!(unsafe { shim::destroy_qp(application.pair) }, 0);
    assert_eq!(numbers(), [0u32; 0]);
    application.pair = application.create_pair(std::ptr::null_mut());
}

#[test]
fn an_application_holds_nothing_for_others_and_its_plan_is_what_it_has() {
    let application = Application::start();
    let plan = shim::plan();
    assert!(
        shim::hold(plan.clone())
            .unwrap_err()
            .contains("is an application")
    );
    let again = shim::plan();
    assert_eq!(plan.objects, again.objects);
    assert_ne!(plan.name, again.name, "two plans have one name");
    assert_eq!(application.change(IBV_QPS_RTS), 0);
    assert_eq!(plan.objects.len(), 4);
    assert_ne!(
        plan.objects,
        shim::plan().objects,
        "a change of state is not noticed"
    );
}

#[test]
fn what_was_made_from_another_plan_is_not_taken() {
    let application = Application::start();
    let earlier = shim::plan();
    let plan = shim::plan();
    suspend_and_release(&application, 0);
    let refused = shim::attach(held(&earlier, 2)).unwrap_err();
    assert!(refused.contains("has changed since"), "{refused}");
    // Nothing was touched.
    shim::attach(held(&plan, 2)).unwrap();
    shim::resume(None).unwrap();
    // A plan from before a move is useless for the next.
    suspend_and_release(&application, 0);
    assert!(shim::attach(held(&plan, 2)).is_err());
    shim::recreate(None).unwrap();
    shim::resume(None).unwrap();
    // The new queue is not among the objects made ahead.
    let plan = shim::plan();
    let (nobody, nothing) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the context is the application's.
    let queue = unsafe { shim::create_cq(application.context, 4, nothing, nobody, 0) };
    suspend_and_release(&application, 0);
    let refused = shim::attach(held(&plan, 2)).unwrap_err();
    assert!(refused.contains("has changed since"), "{refused}");
    shim::recreate(None).unwrap();
    shim::resume(None).unwrap();
    // SAFETY: nothing uses the queue.
    assert_eq!(unsafe { shim::destroy_cq(queue) }, 0);
}
