"""A Celery app with the options that jobs of many hours need."""

from celery import Celery

from app.broker import transport


def create_celery(broker: str) -> Celery:
    """Messages are short-lived wake-ups: acknowledged early, never redelivered, never results."""
    transport.use()
    celery = Celery("dressage", broker=broker)
    celery.conf.update(
        task_acks_late=False,
        worker_prefetch_multiplier=1,
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"socket_timeout": 5, "socket_connect_timeout": 5},
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
    )
    return celery
