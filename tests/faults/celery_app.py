"""The real worker, with a scripted trainer, and a broker that redelivers what takes a second."""

import dataclasses

import worker.celery_app
import worker.tasks

worker.tasks.context = dataclasses.replace(
    worker.celery_app.context, training_module="tests.worker.scripted_trainer"
)
celery = worker.celery_app.celery
celery.conf.broker_transport_options = {
    **celery.conf.broker_transport_options,
    "visibility_timeout": 1,
}
